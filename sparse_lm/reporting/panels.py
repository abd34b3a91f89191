"""The parts of a report's figure, each drawn into axes of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from sparse_lm.reporting.run import Run, edges_between
from sparse_lm.reporting.style import GREY, shade_sparse
from sparse_lm.reporting.units import COUNT, TIME, Unit, fitting, label

MOST_POINTS = 1000  # of a curve; longer ones are drawn as means of neighbours
MOST_MARKERS = 60  # on a curve
MOST_COLUMNS = 400  # of a map
TRAINING = {"linewidth": 0.9, "alpha": 0.5}
HELD_OUT = {"linewidth": 1.8, "marker": "o", "markersize": 3.5}
NOT_FINITE = {"marker": "x", "linestyle": "none", "markersize": 5}
KINDS = {
    "dense": "#2f4b66", "sparse": "#7ba7c9", "compile": "#d9a766", "evaluation": "#8f8f8f", "checkpoint": "#b0b0b0",
    "setup": "#cccccc", "profile": "#dddddd", "other": "#eeeeee",
}  # fmt: skip
"""Colours of the kinds of work in summary.json: training is blue, what comes with it is not."""


def losses_by_tokens(axes: Axes, runs: Sequence[Run], styles: Sequence[dict]) -> None:
    """Training and held-out loss by tokens."""
    unit = fitting(max(run.numbers("tokens")[-1] for run in runs), COUNT)
    _losses(axes, runs, styles, "tokens", unit)
    axes.set(title="Loss by tokens", xlabel=label("tokens", unit))


def losses_by_time(axes: Axes, runs: Sequence[Run], styles: Sequence[dict]) -> None:
    """Training and held-out loss by wall time, all of it: compiling, evaluations and checkpoints, too."""
    ends = [run.numbers("wall_time")[-1] for run in runs]
    unit = fitting(np.nanmax([0.0, *ends]), TIME)
    _losses(axes, runs, styles, "wall_time", unit)
    axes.set(title="Loss by wall time", xlabel=label("wall time, all included", unit))
    missing = [run.name for run, end in zip(runs, ends, strict=True) if np.isnan(end)]
    if missing:
        axes.set_title(f"not recorded: {', '.join(missing)}", loc="right", fontsize="small", fontweight="normal")


def throughput(axes: Axes, runs: Sequence[Run], styles: Sequence[dict]) -> None:
    """Tokens per second of training steps by tokens, from 0."""
    unit = fitting(max(run.numbers("tokens")[-1] for run in runs), COUNT)
    speeds = [run.numbers("tokens_per_second") for run in runs]
    speed_unit = fitting(np.nanmax([0.0, *np.concatenate(speeds)]), COUNT)
    for run, speed, style in zip(runs, speeds, styles, strict=True):
        x = run.numbers("tokens")
        axes.plot(block_means(x, MOST_POINTS) / unit.size, block_means(speed, MOST_POINTS) / speed_unit.size, **style)
    _mark_phases(axes, runs, styles, "tokens", unit)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set(title="Throughput of training steps", xlabel=label("tokens", unit),
             ylabel=label("tokens per second", speed_unit))  # fmt: skip


def time_by_kind(axes: Axes, runs: Sequence[Run]) -> None:
    """Wall time of each run, split by what it went into."""
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
    axes.grid(axis="y", visible=False)
    axes.set(title="Where the time went", xlabel=label("wall time", unit))
    if starts.any():
        axes.legend(ncols=4, loc="lower right")
    for row, run in enumerate(runs):
        if not run.summary:
            axes.annotate("not recorded", (0, row), xytext=(4, 0), textcoords="offset points", va="center",
                          fontsize="small")  # fmt: skip


def sparsity_map(axes: Axes, run: Run, lowest: float) -> QuadMesh:
    """Zeros among a run's activations by layer and tokens, from `lowest` to 1; the first layer is at the foot."""
    tokens, zeros = run.numbers("tokens"), run.by_layer("activation_sparsity")
    unit = fitting(tokens[-1], COUNT)
    edges = edges_between(tokens)[[*_starts(len(tokens), MOST_COLUMNS), len(tokens)]]
    columns = np.stack([block_means(layer, MOST_COLUMNS) for layer in zeros.T])
    mesh = axes.pcolormesh(
        edges / unit.size, np.arange(len(columns) + 1) - 0.5, columns,
        vmin=lowest, vmax=1, cmap="Blues", rasterized=True,
    )  # fmt: skip
    for edge in np.ravel(run.sparse_spans("tokens")):
        axes.axvline(edge / unit.size, color=GREY, linestyle="--", linewidth=1)
    axes.grid(visible=False)
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set(title=f"Zeros among activations: {run.name}", xlabel=label("tokens", unit), ylabel="layer")
    return mesh


def block_means(values: np.ndarray, most: int) -> np.ndarray:
    """f64[n] -> f64[min(n, most)]: means over runs of neighbours, of what is finite there; NaN where nothing is."""
    starts = _starts(len(values), most)
    finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
    counts = np.add.reduceat(finite.astype(int), starts)
    return np.where(counts, sums / np.maximum(counts, 1), np.nan)


def _starts(n: int, most: int) -> np.ndarray:
    """Where each of at most `most` blocks of n entries starts."""
    return np.arange(min(n, most)) * n // min(n, most)


def _losses(axes: Axes, runs: Sequence[Run], styles: Sequence[dict], key: str, unit: Unit) -> None:
    for run, style in zip(runs, styles, strict=True):
        x = run.numbers(key) / unit.size
        loss, held_out = run.numbers("loss"), run.numbers("eval_loss")
        axes.plot(block_means(x, MOST_POINTS), block_means(loss, MOST_POINTS), **style, **TRAINING)
        evaluated = np.isfinite(held_out)
        markers = -(-evaluated.sum() // MOST_MARKERS) or 1
        axes.plot(x[evaluated], held_out[evaluated], markevery=markers, **style, **HELD_OUT)
        bad = run.bad("loss") | run.bad("eval_loss")
        foot = np.full(bad.sum(), 0.03)
        axes.plot(x[bad], foot, transform=axes.get_xaxis_transform(), color=style["color"], **NOT_FINITE)
    _mark_phases(axes, runs, styles, key, unit)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(left=0)
    axes.set_ylabel("loss (nats per token)")


def _mark_phases(axes: Axes, runs: Sequence[Run], styles: Sequence[dict], key: str, unit: Unit) -> None:
    """Shades the sparse phases if the runs agree in them; else draws a bar a run above the axes."""
    spans = [np.array(run.sparse_spans(key)).reshape(-1, 2) / unit.size for run in runs]
    sparse = [edges for edges in spans if len(edges)]
    if all(edges.shape == sparse[0].shape and np.allclose(edges, sparse[0], rtol=1e-3) for edges in sparse):
        for start, end in sparse[0] if sparse else []:
            shade_sparse(axes, start, end)
        return
    for row, (edges, style) in enumerate(zip(spans, styles, strict=True)):
        axes.hlines(np.full(len(edges), 0.98 - 0.02 * row), *edges.T, transform=axes.get_xaxis_transform(),
                    color=style["color"], linewidth=3)  # fmt: skip
    last = max(edges[-1, 1] for edges in sparse)
    axes.annotate("sparse", (last, 0.98), xycoords=("data", "axes fraction"), xytext=(4, 0),
                  textcoords="offset points", va="center", fontsize="small")  # fmt: skip
