"""A report as one HTML file that needs no other: tables of the runs, and their curves to explore."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sparse_lm.reporting.run import Run, block_means, shared_spans
from sparse_lm.reporting.units import COUNT, TIME, fitting, label, short

PANELS = {
    "loss": "loss (nats per token)",
    "tokens_per_second": "tokens per second",
    "mfu": "MFU, dense-equivalent",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "kept_energy": "kept energy of activations",
    "kept_weight_energy": "kept energy of 2:4 weights",
    "flip_rate": "flip rate of 2:4 weights",
    "activation_sparsity": "zeros among activations",
    "expert_load": "load of the busiest expert (1: even)",
    "data_shares": "share of each corpus so far",
    "memory": "peak of device memory (bytes)",
}
"""Titles of the curves, by key of metrics.jsonl; of what layers have, means over them."""
MOST_POINTS = 2000  # of a curve; longer ones are means of neighbours
ROW = 200  # pixels
DASHES = ("solid", "dash", "dot", "dashdot")  # of curves that one run has in one panel
GREY = "#808080"
UNKNOWN = "-"

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #303030; background: #fff; max-width: 1180px; margin: 1em auto;
  padding: 0 .7em; }}
h1 {{ font-size: 1.3em; overflow-wrap: anywhere; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; margin-bottom: 1em; }}
td + td {{ white-space: normal; min-width: 7em; vertical-align: top; }}
th, td {{ padding: .3em .9em .3em 0; text-align: left; border-bottom: 1px solid #e4e4e4; }}
i {{ display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .5em; }}
</style>
</head>
<body>
<h1>{title}</h1>
{tables}
<p>A click on a name hides its run, a drag shows a part of the curves in all panels, a double click all of them.</p>
{figure}
</body>
</html>
"""


def page(runs: Sequence[Run]) -> str:
    """Returns the HTML, with plotly.js and all data in it."""
    title = html.escape("Training: " + ", ".join(run.name for run in runs))
    config = {"responsive": True, "displayModeBar": False}
    figure = draw(runs).to_html(full_html=False, include_plotlyjs=True, config=config)
    return _PAGE.format(
        title=title, tables=_table(_facts(runs), runs) + _table(_differences(runs), runs), figure=figure
    )


def draw(runs: Sequence[Run]) -> go.Figure:
    """Draws a panel below the other for all that was logged, over tokens or, with a button, over wall time."""
    keys = [key for key in PANELS if any(_is_known(run, key) for run in runs) or key == "loss"]
    titles = [PANELS[key] for key in keys]
    figure = make_subplots(len(keys), 1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.25 / len(keys))
    axes = {}
    for axis, units in (("tokens", COUNT), ("wall_time", TIME)):
        largest = np.nanmax([0.0, *(run.numbers(axis)[-1] for run in runs)])
        axes[axis] = fitting(largest, units)
    xs: dict[str, list[np.ndarray]] = {axis: [] for axis in axes}

    def add(run: Run, row: int, where: np.ndarray, y: np.ndarray, most: int = MOST_POINTS, **style: Any) -> None:
        for axis, unit in axes.items():
            xs[axis].append(block_means(run.numbers(axis)[where] / unit.size, most))
        trace = go.Scatter(
            x=xs["tokens"][-1], y=block_means(y[where], most), name=run.name, legendgroup=run.name, **style
        )
        figure.add_trace(trace, row, 1)

    for run in runs:
        whole, held_out = np.ones(len(run.lines), bool), run.numbers("eval_loss")
        for row, key in enumerate(keys, 1):
            line = {"color": run.color, "width": 1 if key == "loss" else 1.5}
            for (part, values), dash in zip(run.curves(key).items(), itertools.cycle(DASHES), strict=False):
                named = {"hovertemplate": f"%{{y:.2%}} {html.escape(part)}"} if part else {}
                add(run, row, whole, values, mode="lines", line=line | {"dash": dash}, showlegend=row == 1, **named)
        evaluated, bad = np.isfinite(held_out), run.bad("loss") | run.bad("eval_loss")
        style = {"mode": "lines+markers", "line": {"color": run.color, "width": 2.5}, "showlegend": False}
        if evaluated.any():
            add(run, 1, evaluated, held_out, hovertemplate="%{y:.4f} held-out", **style)
        if bad.any():
            foot = np.full(len(bad), np.nanmin([np.inf, *run.numbers("loss"), *held_out]))
            foot = np.where(np.isfinite(foot), foot, 1.0)
            marker = {"symbol": "x", "color": run.color}
            add(run, 1, bad, foot, most=len(bad), mode="markers", marker=marker, showlegend=False,
                hovertemplate="not finite")  # fmt: skip
    buttons = [
        {
            "label": label(axis.replace("_", " "), unit),
            "method": "update",
            "args": [{"x": xs[axis]}, {"shapes": _shapes(runs, axis, unit.size)}],
        }
        for axis, unit in axes.items()
    ]
    menu = dict(type="buttons", direction="right", buttons=buttons, x=0, xanchor="left", y=1, yanchor="bottom")
    figure.update_layout(
        template="plotly_white",
        height=ROW * len(keys) + 140,
        margin=dict(l=50, r=10, t=110, b=30),
        hovermode="x",
        hoversubplots="axis",
        legend=dict(orientation="h", yref="container", y=1, yanchor="top", x=0),
        shapes=_shapes(runs, "tokens", axes["tokens"].size),
        updatemenus=[menu | dict(pad=dict(b=30))],
    )
    figure.update_yaxes(type="log", row=1)
    figure.update_xaxes(showticklabels=True)
    return figure


def _is_known(run: Run, key: str) -> bool:
    return any(np.isfinite(values).any() for values in run.curves(key).values())


def _shapes(runs: Sequence[Run], axis: str, size: float) -> list[dict[str, Any]]:
    """Shades the sparse phases: in grey where the runs agree, else each in the colour of its run."""
    shared = shared_spans(runs, axis)
    spans = [(GREY, span) for span in shared or ()]
    if shared is None:
        spans = [(run.color, span) for run in runs for span in run.sparse_spans(axis)]
    return [
        dict(type="rect", xref="x", yref="paper", x0=start / size, x1=end / size, y0=0, y1=1, fillcolor=color,
             opacity=0.12, line_width=0, layer="below")
        for color, (start, end) in spans
    ]  # fmt: skip


def _table(rows: dict[str, list[str]], runs: Sequence[Run]) -> str:
    """Writes a table with a column a run."""
    if not rows:
        return ""
    heads = "".join(f'<th><i style="background:{run.color}"></i>{html.escape(run.name)}</th>' for run in runs)
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>\n"
        for name, cells in rows.items()
    )
    return f'<div class="wide"><table>\n<tr><th></th>{heads}</tr>\n{body}</table></div>\n'


def _facts(runs: Sequence[Run]) -> dict[str, list[str]]:
    return {name: [show(run.summary) if run.summary else UNKNOWN for run in runs] for name, show in FACTS.items()}


def _differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Returns the keys in which the runs' configurations differ."""
    keys = sorted({key for run in runs for key in run.config})
    rows = {key: [str(run.config.get(key, UNKNOWN)) for run in runs] for key in keys}
    return {f"config.{key}": cells for key, cells in rows.items() if len(set(cells)) > 1}


def _loss(evaluation: dict[str, Any] | None) -> str:
    known = evaluation is not None and evaluation["loss"] is not None
    return f"{evaluation['loss']:.4f}" if known else UNKNOWN


def _speed(summary: dict[str, Any], phase: str) -> str:
    speeds = summary["tokens_per_second"]
    return short(speeds[phase], COUNT) if phase in speeds else UNKNOWN


def _device(summary: dict[str, Any]) -> str:
    device = summary["processes"][-1]["device"]
    return f"{device['count']} x {device['kind']}"


def _shares(summary: dict[str, Any]) -> str:
    """Says where the time went, largest share first."""
    seconds = sorted(summary["seconds"].items(), key=lambda item: -item[1])
    total = sum(summary["seconds"].values()) or 1.0
    return ", ".join(f"{kind} {spent / total:.0%}" for kind, spent in seconds if spent >= 0.005 * total)


FACTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "state": lambda summary: summary["state"],
    "steps": lambda summary: f"{summary['step']:,} of {summary['steps']:,}",
    "tokens": lambda summary: short(summary["tokens"], COUNT),
    "training loss": _loss,
    "held-out loss": lambda summary: _loss(summary["evaluation"]),
    "best held-out loss": lambda summary: _loss(summary["best_evaluation"]),
    "wall time": lambda summary: short(summary["wall_time"], TIME),
    "time went into": _shares,
    "tokens/s, dense": lambda summary: _speed(summary, "dense"),
    "tokens/s, sparse": lambda summary: _speed(summary, "sparse"),
    "device": _device,
    "commit": lambda summary: str(summary["processes"][-1].get("git_commit") or UNKNOWN)[:19],
}
"""Rows of the first table: how to show a summary's entry."""
