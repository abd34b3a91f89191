"""The figure of a report as a picture: losses, throughput and time of one run or several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from sparse_lm.reporting.run import Run, block_means, shared_spans
from sparse_lm.reporting.units import COUNT, TIME, Unit, fitting, label

MOST_POINTS = 1000  # of a curve; longer ones are drawn as means of neighbours
KINDS = {
    "dense": "#2f4b66", "sparse": "#7ba7c9", "compile": "#d9a766", "evaluation": "#8f8f8f", "checkpoint": "#b0b0b0",
    "setup": "#cccccc", "profile": "#dddddd", "other": "#eeeeee",
}  # fmt: skip
"""Colours of the kinds of work in summary.json: training is blue, what comes with it is not."""
STYLE = {
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "text.parse_math": False,  # names of runs are names
}
"""To draw and save the figure in."""


def draw(runs: Sequence[Run]) -> Figure:
    """Draws the figure in the style of the context; it belongs to no window and need not be closed."""
    figure = Figure(figsize=(12, 7.4))
    (by_tokens, by_time), (speed, kinds) = figure.subplots(2, 2)
    ends = {axis: np.nanmax([0.0, *(run.numbers(axis)[-1] for run in runs)]) for axis in ("tokens", "wall_time")}
    tokens, time = fitting(ends["tokens"], COUNT), fitting(ends["wall_time"], TIME)
    _losses(by_tokens, runs, "tokens", tokens)
    _losses(by_time, runs, "wall_time", time)
    by_tokens.set(title="Loss by tokens", xlabel=label("tokens", tokens), ylabel="loss (nats per token)")
    by_time.set(title="Loss by wall time", xlabel=label("wall time, all included", time))
    _curves(speed, runs, "tokens", tokens, "tokens_per_second")
    speed.set(title="Tokens per second of training steps", xlabel=label("tokens", tokens), ylim=(0, None))
    _time_by_kind(kinds, runs)
    figure.legend(handles=[by_tokens.lines[2 * i + 1] for i in range(len(runs))], loc="outside upper left", ncols=4)
    return figure


def _losses(axes: Axes, runs: Sequence[Run], axis: str, unit: Unit) -> None:
    _curves(axes, runs, axis, unit, "loss")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())


def _curves(axes: Axes, runs: Sequence[Run], axis: str, unit: Unit, key: str) -> None:
    """Draws a curve a run, thin, with the held-out loss beside the loss; shades the sparse phases if runs agree."""
    for run in runs:
        x, y = run.numbers(axis) / unit.size, run.numbers(key)
        axes.plot(block_means(x, MOST_POINTS), block_means(y, MOST_POINTS), color=run.color, linewidth=0.9, alpha=0.6)
        held_out = run.numbers("eval_loss") if key == "loss" else np.full(len(x), np.nan)
        known = np.isfinite(held_out)
        axes.plot(x[known], held_out[known], color=run.color, marker="o", markersize=3.5, label=run.name)
    for start, end in shared_spans(runs, axis) or ():
        axes.axvspan(start / unit.size, end / unit.size, color="#808080", alpha=0.15, linewidth=0)
    axes.set_xlim(left=0)


def _time_by_kind(axes: Axes, runs: Sequence[Run]) -> None:
    """Draws the wall time of each run, split by what it went into."""
    seconds = [run.summary["seconds"] if run.summary else {} for run in runs]
    unit = fitting(max(sum(kinds.values()) for kinds in seconds), TIME)
    starts = np.zeros(len(runs))
    for kind, color in KINDS.items():
        widths = np.array([kinds.get(kind, 0.0) for kinds in seconds]) / unit.size
        if widths.any():
            axes.barh(range(len(runs)), widths, 0.6, starts, color=color, label=kind)
        starts += widths
    axes.set_yticks(range(len(runs)), [run.name for run in runs])
    axes.set_ylim(max(1.5 * len(runs), 3) - 0.5, -0.5)  # with room for the legend at the foot
    axes.set(title="Where the time went", xlabel=label("wall time", unit))
    if starts.any():
        axes.legend(ncols=4, loc="lower right")
