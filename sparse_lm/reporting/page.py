"""A report as one HTML file that needs no other: tables of the runs, and their curves to explore."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from flax.traverse_util import flatten_dict
from plotly.subplots import make_subplots

from sparse_lm.config import Config, to_dict
from sparse_lm.reporting.run import Run, block_means

PANELS = {
    "loss": "loss (nats per token; held-out thick, with markers)",
    "tokens_per_second": "tokens per second",
    "mfu": "MFU, dense-equivalent",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "kept_energy": "kept energy of activations",
    "kept_weight_energy": "kept energy of 2:4 weights",
    "flip_rate": "flip rate of 2:4 weights",
    "activation_sparsity": "zeros among activations",
    "expert_load": "load of the busiest expert (1: even)",
    "memory": "peak of device memory (bytes)",
}
"""Titles of the curves, by key of metrics.jsonl; of what layers have, means over them."""
MOST_POINTS = 2000  # of a curve; longer ones are means of neighbours
ROW = 200  # pixels
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
<p>A click on a name hides its run, a drag shows a part of the curves in all panels, a double click all of them.
The camera saves a picture.</p>
{figure}
</body>
</html>
"""


def page(runs: Sequence[Run]) -> str:
    """Returns the HTML, with plotly.js and all data in it."""
    title = html.escape("Training: " + ", ".join(run.name for run in runs))
    config = {"responsive": True, "displaylogo": False, "modeBarButtons": [["toImage"]]}
    figure = draw(runs).to_html(full_html=False, include_plotlyjs=True, config=config)
    default = [flatten_dict(to_dict(Config()), sep=".")] if len(runs) == 1 else []
    facts, configs = _rows([_facts(run) for run in runs]), _rows([run.config for run in runs])
    differing = {
        f"config.{key}": cells
        for key, cells in sorted(configs.items())
        if len({*cells, *(_show(values.get(key)) for values in default)}) > 1
    }
    tables = _table(facts, runs) + _table(differing, runs)
    return _PAGE.format(title=title, tables=tables, figure=figure)


def draw(runs: Sequence[Run]) -> go.Figure:
    """Draws a panel below the other for all that was logged, over tokens or, with a button, over wall time."""
    keys = [key for key in PANELS if key == "loss" or any(np.isfinite(run.numbers(key)).any() for run in runs)]
    titles = [PANELS[key] for key in keys]
    figure = make_subplots(len(keys), 1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.25 / len(keys))
    is_long = np.nanmax([0.0, *(run.numbers("wall_time")[-1] for run in runs)]) > 2 * 3600
    axes = {
        "tokens": ("tokens", 1),
        "wall_time": ("wall time (hours)", 3600) if is_long else ("wall time (minutes)", 60),
    }
    xs: dict[str, list[np.ndarray]] = {axis: [] for axis in axes}
    for run in runs:
        for row, key in [*enumerate(keys, 1), (1, "eval_loss")]:
            y, held_out = run.numbers(key), key == "eval_loss"
            where = np.isfinite(y) if held_out else np.full(len(y), True)
            if not where.any():
                continue
            for axis, (_, size) in axes.items():
                xs[axis].append(block_means(run.numbers(axis)[where] / size, MOST_POINTS))
            trace = go.Scatter(
                x=xs["tokens"][-1],
                y=block_means(y[where], MOST_POINTS),
                mode="lines+markers" if held_out else "lines",
                line={"color": run.color, "width": 2.5 if held_out else 1.2},
                name=run.name,
                legendgroup=run.name,
                showlegend=key == "loss",
                hovertemplate="%{y:.4f} held-out" if held_out else None,
            )
            figure.add_trace(trace, row, 1)
    buttons = [
        {"label": label, "method": "update", "args": [{"x": xs[axis]}, {"shapes": _shapes(runs, axis, size)}]}
        for axis, (label, size) in axes.items()
    ]
    menu = dict(type="buttons", direction="right", buttons=buttons, x=0, xanchor="left", y=1, yanchor="bottom")
    figure.update_layout(
        template="plotly_white",
        height=ROW * len(keys) + 140,
        margin=dict(l=50, r=10, t=110, b=30),
        hovermode="x",
        hoversubplots="axis",
        legend=dict(orientation="h", yref="container", y=1, yanchor="top", x=0),
        shapes=_shapes(runs, "tokens", 1),
        updatemenus=[menu | dict(pad=dict(b=30))],
    )
    figure.update_yaxes(type="log", row=1)
    figure.update_xaxes(showticklabels=True)
    return figure


def _shapes(runs: Sequence[Run], axis: str, size: float) -> list[dict[str, Any]]:
    """Shades the sparse phases of each run in its colour: darkest where all runs are sparse."""
    look = dict(type="rect", xref="x", yref="paper", y0=0, y1=1, opacity=0.2 / len(runs), line_width=0, layer="below")
    return [
        look | dict(x0=start / size, x1=end / size, fillcolor=run.color)
        for run in runs
        for start, end in run.sparse_spans(axis)
    ]


def _table(rows: dict[str, list[str]], runs: Sequence[Run]) -> str:
    if not rows:
        return ""
    heads = "".join(f'<th><i style="background:{run.color}"></i>{html.escape(run.name)}</th>' for run in runs)
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>\n"
        for name, cells in rows.items()
    )
    return f'<div class="wide"><table>\n<tr><th></th>{heads}</tr>\n{body}</table></div>\n'


def _facts(run: Run) -> dict[str, Any]:
    """Returns what a run's summary says, by flattened key, or before it has one, what it has logged."""
    if run.summary is None:
        last = run.lines[-1]
        return {"state": "no checkpoint yet", "step": last["step"] + 1, "tokens": last["tokens"], "loss": last["loss"]}
    process = run.summary["processes"][-1]
    device = f"{process['device']['count']} x {process['device']['kind']}"
    facts = {**run.summary, "device": device, "commit": process.get("git_commit")}
    del facts["processes"]
    return flatten_dict(facts, sep=".")


def _rows(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Makes the rows of a table of columns that have some keys each, in the order of the first that has a key."""
    keys = dict.fromkeys(key for column in columns for key in column)
    return {key: [_show(column.get(key)) for column in columns] for key in keys}


def _show(value: Any) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.5g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
