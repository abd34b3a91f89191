r"""Says in what share of dense's time runs reach dense's loss: R for each seed, its mean and 95% interval.

    python -m experiments.quality.time_ratio experiments/results/time_llama1b_h200.json \
        experiments/results/time_llama32_1b_4_layers_h100.json experiments/results/time_afm_4_layers_h200.json \
        --figure=experiments/plots/time_to_loss.svg --names=slices_80_first_dense,slices_80,dense_slices_80

Numbers are of the seeds in all files that have the first one's suite. The figure has a panel for each file, with R if
it is measured, not extrapolated, of exactly one run that `--names` names.

R is a run's time over the time at which dense has the same held-out loss, by the branches of the dense run of the same
seed: a straight line in the logarithm of time between two of them. Below 1 is a gain. The time is that of the training
steps, with what training does between them; in a second number each side's compilation is added. In a third both sides
go at the pace of one GPU: dense steps before any phase take as long. A loss that no branch reaches, or that all are
below of, is extrapolated from the two nearest, and marked with an asterisk.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
from absl import app, flags
from matplotlib.axes import Axes
from scipy import stats

from experiments import plots
from sparse_lm.errors import DataError

LOSSES = {"heldout": "heldout_loss", "second": "second_heldout_loss"}
_KINDS = "ratio", "with_compilation", "at_one_pace"  # fields of `Ratio`

Row = dict[str, Any]


class Ratio(NamedTuple):
    """R of one run; `extrapolated` if dense's loss was not measured on both sides of the run's."""

    seed: int
    ratio: float
    with_compilation: float
    at_one_pace: float | None  # None if the model is another, or a side's first dense steps are not known
    extrapolated: bool


class Summary(NamedTuple):
    """Mean over seeds, and the 95% interval of the t distribution, which takes two seeds."""

    mean: float
    low: float | None
    high: float | None


def rows_of_suite(files: Sequence[plots.Results]) -> list[Row]:
    """Returns the runs in all files of the first one's suite.

    Raises:
      ValueError: two files have a run of the same seed, whose dense losses would be of two texts or machines.
    """
    rows: list[Row] = []
    for file in files:
        if file.data["suite"] == files[0].data["suite"]:
            if twice := {row["seed"] for row in rows} & {row["seed"] for row in file.data["runs"]}:
                raise ValueError(f"{file.path}: another file has runs of seed {min(twice)}, too")
            rows += file.data["runs"]
    return rows


def dense_curve(branches: Sequence[Row], loss: str) -> list[tuple[float, float]]:
    """Returns (seconds, loss) of the branches of one seed's dense run, by time.

    Raises:
      ValueError: a longer branch is no better, so that no time belongs to a loss.
    """
    curve = sorted((row["seconds"], row[loss]) for row in branches)
    if any(later[1] >= earlier[1] for earlier, later in itertools.pairwise(curve)):
        raise ValueError(f"seed {branches[0]['seed']}: dense's {loss} does not fall with time: {curve}")
    return curve


def time_of_loss(curve: Sequence[tuple[float, float]], loss: float) -> tuple[float, bool]:
    """Returns when dense has the loss, and whether that is beyond what was measured."""
    pairs = list(itertools.pairwise(curve))
    pair = next((pair for pair in pairs if loss >= pair[1][1]), pairs[-1])
    (t0, l0), (t1, l1) = pair
    share = (l0 - loss) / (l0 - l1)
    return t0 * (t1 / t0) ** share, not curve[-1][1] <= loss <= curve[0][1]


def ratios(rows: Sequence[Row], loss: str) -> dict[str, list[Ratio]]:
    """Returns R of all runs but the dense one and its branches, by name; without seeds that have no dense curve yet."""
    table: dict[str, list[Ratio]] = {}
    known = [row for row in rows if row.get(loss) is not None]
    for row in sorted(known, key=lambda row: row["seed"]):
        branches = [other for other in known if plots.is_branch(other) and other["seed"] == row["seed"]]
        if row["name"] == "dense" or plots.is_branch(row) or len(branches) < 2:
            continue
        dense_seconds, extrapolated = time_of_loss(dense_curve(branches, loss), row[loss])
        dense = min(branches, key=lambda branch: branch["seconds"])  # the longest may have compiled once more since
        with_compilation = (row["seconds"] + row["compile_seconds"]) / (dense_seconds + dense["compile_seconds"])
        ratio, paces = row["seconds"] / dense_seconds, [side.get("first_dense_ms") for side in (dense, row)]
        comparable = all(paces) and row["model"] == dense["model"]
        at_one_pace = ratio * paces[0] / paces[1] if comparable else None
        found = Ratio(row["seed"], ratio, with_compilation, at_one_pace, extrapolated)
        table.setdefault(row["name"], []).append(found)
    return table


def summarise(values: Sequence[float]) -> Summary:
    """Returns the mean and its 95% interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Summary(mean, None, None)
    reach = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Summary(mean, mean - reach, mean + reach)


def report(rows: Sequence[Row], loss: str) -> dict[str, Any]:
    """Returns what is known of each run by one set of held-out text: R by seed, and its mean and interval."""
    return {
        name: dict(seeds=[ratio._asdict() for ratio in found]) | {key: _over_seeds(found, key) for key in _KINDS}
        for name, found in ratios(rows, loss).items()
    }


def mark_ratio(axes: Axes, rows: Sequence[Row], name: str, found: dict[str, Any]) -> None:
    """Draws an arrow from the time at which dense has a run's loss to the run's, means over R's seeds, with R on it."""
    mean, seeds = found["ratio"]["mean"], [ratio["seed"] for ratio in found["seeds"]]
    of_seeds = [row for row in rows if row["name"] == name and row["seed"] in seeds]
    seconds, loss = (statistics.fmean(row[key] for row in of_seeds) for key in ("seconds", LOSSES["heldout"]))
    arrow = dict(arrowstyle="->", color=plots.GREY, shrinkA=0, shrinkB=6)
    axes.annotate("", (seconds, loss), (seconds / mean, loss), arrowprops=arrow)
    middle, below = seconds * (1 + 1 / mean) / 2, dict(xytext=(0, -4), textcoords="offset points", va="top")
    axes.annotate(f"{mean:.2f} of the time", (middle, loss), ha="center", **below)


def _is_extrapolated(found: dict[str, Any]) -> bool:
    return any(ratio["extrapolated"] for ratio in found["seeds"])


def _over_seeds(found: Sequence[Ratio], kind: str) -> dict[str, float | None] | None:
    values = [getattr(ratio, kind) for ratio in found]
    return None if None in values else summarise(values)._asdict()


def _print(text: str, runs: dict[str, Any]) -> None:
    none = "" if runs else ": no seed has both sides yet"
    print(f"{text} text: R, mean [95% interval]; with compilation; at one pace; n seeds{none}")
    for name, row in runs.items():
        by_seed = " ".join(f"{r['ratio']:.3f}{'*' * r['extrapolated']}" for r in row["seeds"])
        numbers = "; ".join(_interval(row[key]) for key in _KINDS)
        print(f"  {name:<24} {numbers}; n {len(row['seeds'])}: {by_seed}")


def _interval(summary: dict[str, float | None] | None) -> str:
    if summary is None:
        return "unknown"
    interval = "" if summary["low"] is None else f" [{summary['low']:.3f}, {summary['high']:.3f}]"
    return f"{summary['mean']:.3f}{interval}"


def main(arguments: Sequence[str]) -> None:
    if len(arguments) < 2:
        raise app.UsageError("name a file that experiments.quality.time_to_loss wrote")
    try:
        several = [plots.read_results(Path(path)) for path in arguments[1:]]
        rows, refused = rows_of_suite(several), []
    except (DataError, ValueError) as error:
        sys.exit(str(error))
    if empty := [results.path for results in several if not results.data["runs"]]:
        sys.exit(f"{empty[0]}: has no runs yet")
    known = dict.fromkeys(row["name"] for results in several for row in results.data["runs"])
    if unknown := set(flags.FLAGS.names) - set(known):
        sys.exit(f"--names: {sorted(unknown)} must be among {', '.join(known)}")
    for text, loss in LOSSES.items():
        if any(row.get(loss) is not None for row in rows):
            try:
                _print(text, report(rows, loss))
            except ValueError as error:
                refused.append(f"{text} text: {error}")
    if flags.FLAGS.figure:
        matplotlib.use("svg")
        plt.style.use(plots.STYLE)
        figure = plots.losses_over_seconds(*several, names=flags.FLAGS.names)
        for axes, results in zip(figure.axes, several, strict=True):
            try:
                found = report(results.data["runs"], LOSSES["heldout"])
            except ValueError as error:
                refused.append(f"{results.path} is drawn without R: {error}")
                continue
            match [name for name in filter(found.get, flags.FLAGS.names) if not _is_extrapolated(found[name])]:
                case [name]:  # R of several runs would overlap
                    mark_ratio(axes, results.data["runs"], name, found[name])
        figure.savefig(flags.FLAGS.figure, metadata={"Date": None})
    if refused:
        sys.exit("\n".join(refused))


if __name__ == "__main__":
    flags.DEFINE_string("figure", "", "SVG file to draw: loss over seconds; empty for none.")
    flags.DEFINE_list("names", [], "Runs to draw beside dense ones; all by default.")
    app.run(main)
