"""The figure of a report: losses, throughput, time and activation sparsity of one run or several."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sparse_lm.reporting import panels
from sparse_lm.reporting.run import Run
from sparse_lm.reporting.style import GREY, STYLE

INK = "303030"
ON_WHITE = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK),
    "grid.color": "e4e4e4",
    "figure.constrained_layout.h_pad": 0.09,  # inches
    "figure.constrained_layout.w_pad": 0.09,
    "axes.titleweight": "bold",
    "text.parse_math": False,  # names of runs are names
}
WIDTH, ROW = 12.0, 3.4  # inches


def style() -> list:
    """What to draw and save a report's figure in: `with matplotlib.style.context(style())`."""
    return [STYLE, ON_WHITE]


def run_styles(count: int) -> list[dict[str, str]]:
    """Line style and colour of each of so many runs."""
    return list(itertools.islice(itertools.cycle(mpl.rcParams["axes.prop_cycle"]), count))


def draw(runs: Sequence[Run]) -> Figure:
    """The whole figure, in the style of the context; it belongs to no window and need not be closed."""
    mapped = [run for run in runs if np.isfinite(run.by_layer("activation_sparsity")).any()]
    map_rows = -(-len(mapped) // 2)
    figure = Figure(figsize=(WIDTH, ROW * (2 + 0.75 * map_rows) + 0.6))
    grid = figure.add_gridspec(2 + map_rows, 2, height_ratios=[1, 1] + [0.7] * map_rows)
    styles = run_styles(len(runs))

    by_tokens = figure.add_subplot(grid[0, 0])
    panels.losses_by_tokens(by_tokens, runs, styles)
    panels.losses_by_time(figure.add_subplot(grid[0, 1], sharey=by_tokens), runs, styles)
    panels.throughput(figure.add_subplot(grid[1, 0]), runs, styles)
    panels.time_by_kind(figure.add_subplot(grid[1, 1]), runs)
    _draw_maps(figure, grid, mapped)
    entries = _legend(runs, styles)
    longest = max(len(entry.get_label()) for entry in entries)
    columns = max(1, int(WIDTH * 11) // (longest + 7))  # about 11 letters an inch, and 7 for the line beside them
    figure.legend(handles=entries, loc="outside upper left", ncols=columns)
    return figure


def _draw_maps(figure: Figure, grid, runs: Sequence[Run]) -> None:
    if not runs:
        return
    least = min(np.nanmin(run.by_layer("activation_sparsity")) for run in runs)
    lowest = np.floor(10 * least) / 10
    cells = [grid[2 + i // 2, i % 2] for i in range(len(runs))] if len(runs) > 1 else [grid[2, :]]
    axes = [figure.add_subplot(cell) for cell in cells]
    meshes = [panels.sparsity_map(ax, run, lowest) for ax, run in zip(axes, runs, strict=True)]
    figure.colorbar(meshes[0], ax=axes, label="share of zeros", shrink=0.9, pad=0.01).outline.set_visible(False)


def _legend(runs: Sequence[Run], styles: Sequence[dict[str, str]]) -> list[Artist]:
    entries = [Line2D([], [], label=run.name, **style) for run, style in zip(runs, styles, strict=True)]
    entries.append(Line2D([], [], color=GREY, label="training", **panels.TRAINING))
    if any(np.isfinite(run.numbers("eval_loss")).any() for run in runs):
        entries.append(Line2D([], [], color=GREY, label="held-out", **panels.HELD_OUT))
    if any((run.bad("loss") | run.bad("eval_loss")).any() for run in runs):
        entries.append(Line2D([], [], color=GREY, label="not finite", **panels.NOT_FINITE))
    return entries
