"""Draws the results that there are.

    python -m experiments.plots --output=experiments/plots

One SVG file a figure, named after the JSON file in experiments/results that it is drawn from. The same
results give the same files.
"""

from __future__ import annotations

import fnmatch
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import matplotlib
import matplotlib.pyplot as plt
from absl import app, flags
from matplotlib.figure import Figure

from experiments.plot_kernels import feed_forwards, products_24, products_venom, sparsifiers
from experiments.plot_losses import final_losses, kernel_agreement, loss_curves, one_run, small_runs
from experiments.plot_results import RESULTS, Results, find_results
from experiments.plot_steps import frontier, losses_over_time, speedups_of_runs, whole_steps
from sparse_lm.reporting.style import STYLE


class Plot(NamedTuple):
    """A figure of every result file of one kind."""

    files: str  # their names are this and where the results are from
    table: str  # that such a file has
    draw: Callable[[Results], Figure]
    written_by: str


PLOTS = [
    Plot("matmul", "matmul_24", products_24, "experiments.kernels.products"),
    Plot("matmul", "matmul_venom", products_venom, "experiments.kernels.products"),
    Plot("sparsify", "sparsify_24", sparsifiers, "experiments.kernels.passes"),
    Plot("ffn", "ffn", feed_forwards, "experiments.bench.ffn"),
    Plot("step", "recipes", whole_steps, "experiments.bench.step"),
    Plot("quality", "runs", loss_curves, "experiments.quality.train_suite"),
    Plot("quality", "runs", final_losses, "experiments.quality.train_suite"),
    Plot("kernel_agreement", "losses", kernel_agreement, "experiments.quality.kernel_agreement"),
    Plot("llama60m", "steps", one_run, "sparse_lm.train"),
    Plot("llama1b", "steps", one_run, "sparse_lm.train"),
    Plot("tiny", "runs", small_runs, "sparse_lm.train"),
]


def figures(*patterns: str, directory: pathlib.Path = RESULTS) -> Iterator[tuple[str, Figure]]:
    """Name and figure of all that can be drawn, or of what has a name like one of these ("quality_*_final_losses")."""
    for plot in PLOTS:
        for results in find_results(plot.files, plot.table, directory):
            name = f"{results.name}_{plot.draw.__name__}"
            if _is_like(name, patterns):
                yield name, plot.draw(results)


def frontiers(*patterns: str, directory: pathlib.Path = RESULTS) -> Iterator[tuple[str, Figure]]:
    """Loss against speed, and over time, of every suite of runs that end dense, with dense ones among them and with
    recipes whose steps were timed in llama1b; all of them, or those with a name like one of these."""
    suites = [suite for suite in find_results("quality", "runs", directory) if suite.has_dense_run and suite.ends_dense]
    timed = find_results("step_llama1b_8x4096", "recipes", directory)
    for suite, steps in itertools.product(suites, timed):
        if "dense" in steps.data["recipes"] and len(speedups_of_runs(suite, steps)) > 1:
            for draw in (frontier, losses_over_time):
                name = f"{suite.name}_{steps.name}_{draw.__name__}"
                if _is_like(name, patterns):
                    yield name, draw(suite, steps)


def absent(directory: pathlib.Path = RESULTS) -> list[str]:
    """The kinds of results that are not there, and what would write them."""
    kinds = dict.fromkeys((plot.files, plot.table, plot.written_by) for plot in PLOTS)
    return [
        f"no {files}_*.json: python -m {script} would write it"
        for files, table, script in kinds
        if not find_results(files, table, directory)
    ]


def _is_like(name: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def main(_) -> None:
    matplotlib.use("svg")
    plt.style.use(STYLE)
    output = pathlib.Path(flags.FLAGS.output)
    output.mkdir(parents=True, exist_ok=True)
    for name, figure in itertools.chain(figures(), frontiers()):
        path = output / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        print(f"{path}: {path.stat().st_size / 1e3:.0f} KB")
    print("\n".join(absent()))


if __name__ == "__main__":
    flags.DEFINE_string("output", "experiments/plots", "Directory of the figures.")
    app.run(main)
