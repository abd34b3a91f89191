"""A report as one HTML file that needs no other."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from sparse_lm.reporting.run import Run
from sparse_lm.reporting.units import COUNT, TIME, short

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #303030; background: #fff; max-width: 1180px; margin: 2em auto;
  padding: 0 1em; }}
h1 {{ font-size: 1.4em; font-weight: 600; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; margin-bottom: 1.5em; }}
th, td {{ padding: .3em .9em .3em 0; text-align: right; border-bottom: 1px solid #e4e4e4; }}
th {{ font-weight: 600; }}
th:first-child, td:first-child, th:last-child, td:last-child {{ text-align: left; }}
.run {{ display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .5em; }}
figure {{ margin: 0; }}
svg {{ width: 100%; height: auto; }}
svg text {{ font-family: system-ui, sans-serif !important; }}
</style>
</head>
<body>
<h1>{title}</h1>
<div class="wide">
{table}
</div>
<figure>
{svg}
</figure>
</body>
</html>
"""
UNKNOWN = "-"


def page(runs: Sequence[Run], figure: Figure, colors: Sequence[str]) -> str:
    """The HTML: a table of the runs and the figure, as SVG in the page itself.

    Args:
      runs: one or more.
      figure: of `figure.draw`, in the style of the context.
      colors: of the runs in it.
    """
    title = "Training: " + ", ".join(run.name for run in runs)
    return PAGE.format(title=html.escape(title), table=_table(runs, colors), svg=_svg(figure))


def _svg(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    return text[text.index("<svg") :]  # without the XML declaration, which names a DTD elsewhere


def _table(runs: Sequence[Run], colors: Sequence[str]) -> str:
    rows = [_row(run, color) for run, color in zip(runs, colors, strict=True)]
    header = "".join(f"<th>{html.escape(name)}</th>" for name in ("run", *COLUMNS))
    return "\n".join(["<table>", f"<tr>{header}</tr>", *rows, "</table>"])


def _row(run: Run, color: str) -> str:
    dot = f'<span class="run" style="background:{color}"></span>'
    cells = [dot + html.escape(run.name), *(html.escape(_cell(run, show)) for show in COLUMNS.values())]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _cell(run: Run, show: Callable[[dict[str, Any]], str]) -> str:
    return show(run.summary) if run.summary else UNKNOWN


def _loss(evaluation: dict[str, Any] | None) -> str:
    known = evaluation is not None and evaluation["loss"] is not None
    return f"{evaluation['loss']:.4f}" if known else UNKNOWN


def _speed(summary: dict[str, Any], phase: str) -> str:
    speeds = summary["tokens_per_second"]
    return short(speeds[phase], COUNT) if phase in speeds else UNKNOWN


def _device(summary: dict[str, Any]) -> str:
    """Of the last process."""
    device = summary["processes"][-1]["device"]
    return f"{device['count']} x {device['kind']}"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "steps": lambda summary: f"{summary['step']:,} of {summary['steps']:,}",
    "tokens": lambda summary: short(summary["tokens"], COUNT),
    "training loss": _loss,
    "held-out loss": lambda summary: _loss(summary["evaluation"]),
    "best": lambda summary: _loss(summary["best_evaluation"]),
    "wall time": lambda summary: short(summary["wall_time"], TIME),
    "tokens/s dense": lambda summary: _speed(summary, "dense"),
    "tokens/s sparse": lambda summary: _speed(summary, "sparse"),
    "device": _device,
    "state": lambda summary: summary["state"],
}
"""Of the table, by heading: how to show a summary's entry."""
