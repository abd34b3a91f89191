"""Draws R of runs of the suites in MODELS whose time to dense's loss was measured: the figure of docs/recipes.md.

    python -m experiments.quality.overview --output=experiments/plots/ratios.svg

R is that of `experiments.quality.time_ratio`, by held-out text of the same kind, over the seeds of all files. A circle
is a run's time over that of the whole dense run, which R would be if both ended level; what lies between the two is
what the run's loss costs.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import matplotlib.pyplot as plt
from absl import app, flags
from matplotlib.figure import Figure

from experiments import plots
from experiments.quality.time_ratio import LOSSES, Row, Summary, ratios, summarise

MODELS = {
    "llama1b": "llama1b, 25 layers",
    "llama1b_25_layers": "llama1b, 25 layers, rate 3e-4",
    "llama1b_8_layers": "llama1b, 8 layers",
    "afm_4_layers": "AFM's width, 4 layers",
    "afm_4_layers_fp8": "AFM's width, 4 layers, all FP8",
    "afm_4_layers_muon": "AFM's width, 4 layers, Muon",
    "llama32_1b_4_layers": "Llama-3.2-1B, 4 layers, SwiGLU",
    "llama60m": "D 512, 8 layers",
    "narrow_afm_4_layers": "AFM's shape at D 768",
    "mixture_4_layers": "mixture, four experts a token",
    "mixture_4_layers_wide": "mixture, four experts of 4096 a token",
    "mixture_4_layers_two": "mixture, two experts a token",
    "mixture_4_layers_gated": "mixture, two with SwiGLU a token",
}
"""Titles say what a suite trains. They are drawn in this order."""
_LEFT_OUT = "dense_rate", "stages", "grown"  # dense at other rates, and what was tried and removed


class Point(NamedTuple):
    """Holds what is drawn of one run: R, its time over the whole dense run's, its seeds."""

    label: str
    model: str
    rival: bool  # or a control
    ratio: Summary
    level: float
    seeds: int
    extrapolated: bool


def points(files: Sequence[plots.Results]) -> list[Point]:
    """Returns one point for each run of each suite, over the seeds of all its files, in the order of `MODELS`."""
    found: list[Point] = []
    for suite, model in MODELS.items():
        by_name: dict[str, list[tuple[float, float, bool]]] = {}
        for file in files:
            if file.data["suite"] == suite:
                rows = file.data["runs"]
                for name, of_seeds in ratios(rows, LOSSES["heldout"]).items():
                    levels = [_seconds(rows, name, r.seed) / _seconds(rows, "dense@1.0", r.seed) for r in of_seeds]
                    pairs = zip(of_seeds, levels, strict=True)
                    by_name.setdefault(name, []).extend((r.ratio, level, r.extrapolated) for r, level in pairs)
        for name, measured in by_name.items():
            if not name.startswith(_LEFT_OUT):
                each, levels, extrapolated = zip(*measured, strict=True)
                label = re.sub(r"(?<!_m)_(\d\d)(?=_|$)", r" \1%", name).replace("_", " ")
                label = f"{model}: {label} ({len(each)})"
                rival, level = "slices" not in name and "experts24" not in name, statistics.fmean(levels)
                found.append(Point(label, model, rival, summarise(each), level, len(each), any(extrapolated)))
    return found


def _seconds(rows: Sequence[Row], name: str, seed: int) -> float:
    return next(row["seconds"] for row in rows if (row["name"], row["seed"]) == (name, seed))


def draw(found: Sequence[Point]) -> Figure:
    """Draws R of each run, with its 95% interval from three seeds on, hollow where it is extrapolated."""
    figure, axes = plots.new_figure(9, 1.2 + 0.24 * len(found), "experiments/results/time_*.json")
    models = list(dict.fromkeys(point.model for point in found))
    for place, point in enumerate(found):
        colour = f"C{models.index(point.model)}"
        axes.plot([point.level, point.ratio.mean], [place, place], color=colour, linewidth=1)
        axes.plot(point.level, place, "o", color=colour, fillstyle="none", markersize=5)
        filled = "none" if point.extrapolated else "full"
        axes.plot(point.ratio.mean, place, "s" if point.rival else "D", color=colour, fillstyle=filled, markersize=6)
        if point.seeds > 2:
            axes.plot([point.ratio.low, point.ratio.high], [place, place], color=colour, linewidth=4, alpha=0.3)
    axes.axvline(1, color=plots.GREY, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(found)), [point.label for point in found], fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel="share of dense's time", title="time to dense's loss, by run (seeds)")
    meanings = {"D": "R", "s": "R of a rival or control", "o": "time over the whole dense run's"}
    for mark, meaning in meanings.items():
        axes.plot([], [], mark, color=plots.GREY, fillstyle="none" if mark == "o" else "full", label=meaning)
    axes.legend(loc="upper right")
    return figure


def main(_) -> None:
    matplotlib.use("svg")
    plt.style.use(plots.STYLE)
    files = [plots.read_results(path) for path in sorted(plots.RESULTS.glob("time_*.json"))]
    draw(points(files)).savefig(flags.FLAGS.output, metadata={"Date": None})


if __name__ == "__main__":
    flags.DEFINE_string("output", None, "SVG file to draw.", required=True)
    app.run(main)
