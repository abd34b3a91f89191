"""Reads result files and draws figures of them, in one style. The same results give the same files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from sparse_lm.errors import DataError

RESULTS = Path(__file__).parent / "results"
GREY = "#808080"
STYLE = [
    "seaborn-v0_8-whitegrid",
    {
        "figure.facecolor": "white", "figure.constrained_layout.use": True, "axes.titlelocation": "left",
        "axes.titlesize": "medium", "axes.spines.top": False, "axes.spines.right": False, "legend.fontsize": "small",
        "font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "sparse_lm",
    },
]  # fmt: skip
"""On white: a figure without a background is black on black in some viewers. Text stays text."""

Run = dict[str, Any]


class Results(NamedTuple):
    """Holds what a benchmark or a suite of runs wrote."""

    path: Path
    data: Any

    @property
    def caption(self) -> str:
        known = [self.data[key].split(";")[0] for key in ("device", "date") if key in self.data]
        return ", ".join([self.path.name, *known])


def read_results(path: Path) -> Results:
    """Reads what `experiments.quality.time_to_loss` wrote; raises DataError if a file is something else."""
    try:
        data = json.loads(path.read_text())
        return Results(path, data | {key: data[key] for key in ("suite", "runs")})
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path}: is no result of experiments.quality.time_to_loss: {error!r}") from error


def new_figure(width: float, height: float, caption: str, **subplots: Any) -> tuple[Figure, Any]:
    """Makes a figure of that many inches with a caption at its foot, and its axes, as `plt.subplots` gives them."""
    figure, axes = plt.subplots(figsize=(width, height), **subplots)
    figure.supxlabel(caption, fontsize="x-small", x=0.99, ha="right")
    return figure, axes


def losses_over_seconds(*several: Results, names: Sequence[str] = ()) -> Figure:
    """Draws what `experiments.quality.time_to_loss` measured, a panel a file: held-out loss over seconds of training.

    Lines are losses on the way, and marks where runs end: dense ones of several lengths, joined, and the others, of
    which `names` are drawn, or all.
    """
    caption = "; ".join(results.caption for results in several)
    figure, panels = new_figure(2 + 4 * len(several), 4, caption, ncols=len(several), squeeze=False)
    for axes, results in zip(panels[0], several, strict=True):
        runs = results.data["runs"]
        found = list(dict.fromkeys(run["name"] for run in runs if run["name"].split("@")[0] != "dense"))
        drawn = [name for name in found if not names or name in names]
        for run in runs:
            if run["name"] in drawn:
                look = dict(color=f"C{drawn.index(run['name'])}")
                axes.plot(*_clocked(run), linewidth=0.8, **look)
                mark, label = "os^vD*"[drawn.index(run["name"]) % 6], run["name"].replace("_", " ")
                axes.plot(run["seconds"], run["heldout_loss"], mark, label=label, **look)
        for seed in sorted({run["seed"] for run in runs}):
            dense = sorted((r for r in runs if is_branch(r) and r["seed"] == seed), key=lambda run: run["seconds"])
            if dense:
                axes.plot(*_clocked(dense[-1]), "k", linewidth=0.8)
                ends = zip(*((run["seconds"], run["heldout_loss"]) for run in dense), strict=True)
                axes.plot(*ends, "k.:", label="dense, by length")
        final = [run["heldout_loss"] for run in runs if is_branch(run) or run["name"] in drawn]
        axes.set_ylim(min(final) - 0.1, max(final) + 0.6)
        axes.set(xlabel="seconds of training", ylabel="held-out loss (nats per token)")
        axes.set_title(results.data["suite"].replace("_", " "))
        by_label = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))  # one of each for all seeds
        axes.legend(by_label.values(), by_label.keys(), loc="lower left")
    return figure


def _clocked(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seconds at which a run was evaluated, by the mean time of a step in each phase, and the losses."""
    tokens, losses = np.transpose(run["heldout_curve"])
    steps = tokens / run["tokens_per_step"]
    start, end = run["sparse_steps"] or (0, 0)
    sparse = np.clip(steps, start, end) - start
    ms = run["step_ms"]
    return ((steps - sparse) * ms.get("dense", 0.0) + sparse * ms.get("sparse", 0.0)) / 1e3, losses


def is_branch(run: Run) -> bool:
    """Returns True for a dense run of one of several lengths, such as "dense@0.8"."""
    return run["name"].startswith("dense@")
