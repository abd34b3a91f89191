"""Draws a figure of each file of experiments/results that has products, FFNs, steps or losses.

    python -m experiments.plots --output=experiments/plots [--only='step_llama1b_*']

One SVG file a figure, named after the JSON file that it is drawn from. The same results give the same files.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
        """Names the file, the device and the date."""
        known = [self.data[key].split(";")[0] for key in ("device", "date") if key in self.data]
        return ", ".join([self.path.name, *known])


def read_results(path: Path) -> Results:
    """Reads a JSON file."""
    return Results(path, json.loads(path.read_text()))


def new_figure(width: float, height: float, caption: str, **subplots: Any) -> tuple[Figure, Any]:
    """Makes a figure of that many inches with a caption at its foot, and its axes, as `plt.subplots` gives them."""
    figure, axes = plt.subplots(figsize=(width, height), **subplots)
    figure.supxlabel(caption, fontsize="x-small", x=0.99, ha="right")
    return figure, axes


def limit(axes: Axes, x: float, label: str) -> None:
    """Draws a vertical line that no measurement can pass, or that it is measured against."""
    axes.axvline(x, color=GREY, linestyle="--", linewidth=1)
    axes.annotate(label, (x, 1), xycoords=("data", "axes fraction"), xytext=(-3, 2), textcoords="offset points",
                  ha="right", fontsize="small")  # fmt: skip


def products_24(results: Results) -> Figure:
    """Draws 2:4 products against cuBLAS, by shape."""
    rows = results.data["matmul_24"]
    figure, axes = new_figure(6.5, 1.0 + 0.4 * len(rows), results.caption)
    names = [f"{row['m']} x {row['n']} x {row['k']}" for row in rows]
    axes.plot([row["speedup"] for row in rows], names, "o", label="B as stored")
    axes.plot([row["speedup_transposed"] for row in rows], names, "x", label="B and result transposed")
    limit(axes, 1, "cuBLAS, dense")
    limit(axes, 2, "limit")
    axes.invert_yaxis()
    axes.set(xlim=(0.9, 2.1), xlabel="speed-up (times)", ylabel="M x N x K")
    axes.set_title("2:4 product, bf16", pad=16)
    axes.legend(loc="center", bbox_to_anchor=(0.25, 0.5))
    return figure


def feed_forwards(results: Results) -> Figure:
    """Draws one FFN by recipe against the dense one: a panel for each shape, without and with its backward."""
    rows = [row for row in results.data["ffn"] if row["recipe"] != "dense"]
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    shapes = list(dict.fromkeys((row["dim"], row["neurons"]) for row in rows))
    figure, panels = new_figure(
        8.5, (1.1 + 0.25 * len(recipes)) * len(shapes), results.caption, nrows=len(shapes), ncols=2,
        sharex=True, sharey=True, squeeze=False,
    )  # fmt: skip
    parts = {"forward": "forward", "both": "forward and backward"}
    for (shape, in_a_row), (column, part) in itertools.product(zip(shapes, panels, strict=True), enumerate(parts)):
        axes = in_a_row[column]
        for tokens in sorted({row["tokens"] for row in rows}):
            points = [row for row in rows if (row["dim"], row["neurons"], row["tokens"]) == (*shape, tokens)]
            places = [recipes.index(row["recipe"]) for row in points]
            axes.plot([row[f"{part}_speedup"] for row in points], places, "o", label=f"{tokens} tokens")
        axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(recipes)), recipes)
        axes.set_ylim(len(recipes) - 0.5, -0.5)
        axes.set_title(f"D {shape[0]}, F {shape[1]}: {parts[part]}")
    panels[0, 1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    for axes in panels[-1]:
        axes.set_xlabel("speed-up over dense (times)")
    return figure


def whole_steps(results: Results) -> Figure:
    """Draws the time of a step by recipe, coloured by part of the model where kernels were timed."""
    recipes = results.data["recipes"]
    names, times = list(recipes), [row["step_ms"] for row in recipes.values()]
    figure, axes = new_figure(9, 1.7 + 0.35 * len(names), results.caption)
    axes.barh(names, times, color=GREY, alpha=0.3)
    by_part = {name: row.get("ms_by_part", {}) for name, row in recipes.items()}
    parts = list(dict.fromkeys(part for milliseconds in by_part.values() for part in milliseconds))
    starts = dict.fromkeys(names, 0.0)
    for part, colour in zip(parts, plt.get_cmap("tab20")(np.linspace(0, 1, max(2, len(parts)))), strict=False):
        widths = [by_part[name].get(part, {"total": 0.0})["total"] for name in names]
        axes.barh(names, widths, 0.5, list(starts.values()), color=colour, label=part)
        starts = {name: starts[name] + width for name, width in zip(names, widths, strict=True)}
    for i, ms in enumerate(times):
        text = f"{ms:.0f} ms" + (f", {recipes['dense']['step_ms'] / ms:.2f} times" if "dense" in recipes else "")
        axes.annotate(text, (ms, i), xytext=(4, 0), textcoords="offset points", va="center")
    if parts:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlim=(0, 1.5 * max(times)), xlabel="time of a step (ms); speed-up over dense")
    model, tokens = results.data["model"], results.data["batch_size"] * results.data["seq_len"]
    gpus = math.prod(results.data.get("mesh", {}).values())
    spread = f" on {gpus} GPUs" if gpus > 1 else ""
    title = f"D {model['dim']}, F {model['ffn_dim']}, {model['layers']} layers, {tokens} tokens{spread}"
    axes.set_title(title, pad=16)
    return figure


def loss_curves(results: Results) -> Figure:
    """Draws held-out loss by tokens, means over seeds, and below it how far above dense runs of equal length."""
    runs = results.data["runs"]
    names = list(dict.fromkeys(run["name"] for run in runs))
    figure, (losses, gaps) = new_figure(9, 6, results.caption, nrows=2, sharex=True)
    for i, name in enumerate(names):
        look = dict(color=f"C{i % 6}", linestyle=("-", "--", ":")[i // 6 % 3])
        tokens, loss = mean_curve([run for run in runs if run["name"] == name])
        losses.plot(tokens / 1e6, loss, label=f"{name}: {loss[-1]:.4f}", **look)
        if pairs := _pairs(runs, name):
            compared, dense = zip(*pairs, strict=True)
            (tokens, loss), (dense_tokens, dense_loss) = mean_curve(compared), mean_curve(dense)
            if tokens[-1] == dense_tokens[-1]:  # else its rate falls elsewhere
                gaps.plot(tokens / 1e6, loss - np.interp(tokens, dense_tokens, dense_loss), **look)
    losses.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    losses.set_ylabel("held-out loss (nats per token)")
    gaps.set(ylabel="above dense (nats per token)", xlabel="tokens (millions)")
    return figure


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


def mean_curve(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and held-out loss, the mean over runs that are evaluated at the same steps."""
    tokens, losses = np.transpose([run["heldout_curve"] for run in runs], (2, 0, 1))
    return tokens[0], losses.mean(axis=0)


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


def _pairs(runs: Iterable[Run], name: str) -> list[tuple[Run, Run]]:
    """Returns the runs of that name, each with the dense run of its seed; without those for which there is none."""
    dense = {run["seed"]: run for run in runs if run["name"] == "dense"}
    return [(run, dense[run["seed"]]) for run in runs if run["name"] == name and run["seed"] in dense]


PLOTS: list[tuple[str, str, Callable[[Results], Figure]]] = [  # how files are called, a table they have, the figure
    ("matmul", "matmul_24", products_24),
    ("ffn", "ffn", feed_forwards),
    ("step", "recipes", whole_steps),
    ("quality", "runs", loss_curves),
    ("time", "runs", losses_over_seconds),
]


def figures(*patterns: str, directory: Path = RESULTS) -> Iterator[tuple[str, Figure]]:
    """Yields name and figure of all that can be drawn, or of what has a name like one of these ("step_llama1b_*")."""
    for files, table, draw in PLOTS:
        for path in sorted(directory.glob(f"{files}_*.json")):
            name = f"{path.stem}_{draw.__name__}"
            if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                results = read_results(path)
                if table in results.data:
                    yield name, draw(results)


def main(_: Sequence[str]) -> None:
    matplotlib.use("svg")
    plt.style.use(STYLE)
    output = Path(flags.FLAGS.output)
    output.mkdir(parents=True, exist_ok=True)
    for name, figure in figures(*flags.FLAGS.only):
        path = output / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        print(f"{path}: {path.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    flags.DEFINE_string("output", None, "Directory of the figures.", required=True)
    flags.DEFINE_list("only", [], "Patterns of names; all by default.")
    app.run(main)
