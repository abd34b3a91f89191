"""Figures of losses: runs over tokens, what recipes cost at equal tokens, and kernels against the reference."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.plot_results import Results, new_figure
from sparse_lm.reporting.style import shade_sparse

Run = dict[str, Any]


def one_run(results: Results) -> Figure:
    """Training loss of one run by step, its sparse phase shaded."""
    lines = results.data["steps"]
    figure, axes = new_figure(7, 3, results.caption)
    axes.plot([line["step"] for line in lines], [line["loss"] for line in lines])
    sparse = [line["step"] for line in lines if line["phase"] == "sparse"]
    shade_sparse(axes, sparse[0], sparse[-1])
    axes.set_yscale("log")
    axes.set_yticks([3, 4, 5, 6, 8, 10], ["3", "4", "5", "6", "8", "10"], minor=False)
    axes.set_yticks([], minor=True)
    axes.set(xlabel="step", ylabel="training loss (nats per token)")
    return figure


def small_runs(results: Results) -> Figure:
    """Held-out losses of the tiny configurations."""
    runs = sorted(results.data["runs"], key=lambda run: run["heldout_loss"])
    names = [run["config"].removeprefix("configs/").removesuffix(".py") for run in runs]
    figure, axes = new_figure(6.5, 0.9 + 0.3 * len(runs), results.caption)
    axes.plot([run["heldout_loss"] for run in runs], names, "o")
    axes.invert_yaxis()
    axes.set(xlabel="held-out loss (nats per token), one seed", title="Tiny runs: a smoke test")
    return figure


def loss_curves(results: Results) -> Figure:
    """Held-out loss by tokens, means over seeds, and below it how far above dense runs of the same seeds, if any."""
    runs = results.data["runs"]
    names = list(dict.fromkeys(run["name"] for run in runs))
    panels = ["loss", "gap"] if results.has_dense_run else ["loss"]
    figure, axes = new_figure(
        8.5, 0.5 + 2.8 * len(panels), results.caption, nrows=len(panels), sharex=True, squeeze=False
    )
    curves = {name: mean_curve(_named(runs, name)) for name in names}
    for panel, (ax,) in zip(panels, axes, strict=True):
        for name, (tokens, loss) in (curves if panel == "loss" else _gap_curves(runs, names)).items():
            ax.plot(tokens / 1e6, loss, label=name)
        if window := _sparse_tokens(results):
            shade_sparse(ax, *window)
        ax.set_ylabel("held-out loss (nats per token)" if panel == "loss" else "above dense (nats per token)")
    axes[0, 0].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes[-1, 0].set_xlabel("tokens (millions)")
    return figure


def final_losses(results: Results) -> Figure:
    """Final held-out loss of every run: one dot a seed, a bar at their mean."""
    runs = results.data["runs"]
    names = list(dict.fromkeys(run["name"] for run in runs))
    figure, axes = new_figure(7, 1.1 + 0.3 * len(names), results.caption)
    for i, name in enumerate(names):
        losses = [run["heldout_loss"] for run in _named(runs, name)]
        axes.plot(losses, [name] * len(losses), "o", color="C0", alpha=0.5)
        axes.plot(statistics.fmean(losses), i, "|", color="C1", markersize=14)
    axes.invert_yaxis()
    axes.set(xlabel="held-out loss (nats per token)", title="Dot: a seed; bar: mean")
    return figure


def kernel_agreement(results: Results) -> Figure:
    """How far the losses of runs on kernels, and on the reference summed in another order, drift apart."""
    curves = {name: np.array(curve) for name, curve in results.data["losses"].items()}
    sparsity = results.data["sparsity"]
    start, end = sparsity["start_step"], sparsity["end_step"]
    figure, axes = new_figure(7, 3.6, results.caption)
    for name in ("kernels", "reference_in_halves", "reference_again"):
        apart = np.abs(curves[name] - curves["reference"])
        axes.plot(start + np.arange(len(apart)), np.where(apart > 0, apart, np.nan), label=name.replace("_", " "))
    shade_sparse(axes, start, end)
    axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="loss, apart from the reference (nats)")
    axes.legend()
    return figure


def final_gaps(results: Results) -> dict[str, list[float]]:
    """Final held-out losses less those of the dense runs of the same seeds, where there are such, by name."""
    runs = results.data["runs"]
    names = dict.fromkeys(run["name"] for run in runs)
    gaps = {name: [run["heldout_loss"] - dense["heldout_loss"] for run, dense in _pairs(runs, name)] for name in names}
    return {name: values for name, values in gaps.items() if values}


def _named(runs: Iterable[Run], name: str) -> list[Run]:
    return [run for run in runs if run["name"] == name]


def _pairs(runs: list[Run], name: str) -> list[tuple[Run, Run]]:
    """The runs of that name, each with the dense run of its seed; without those for which there is none yet."""
    dense = {run["seed"]: run for run in _named(runs, "dense")}
    return [(run, dense[run["seed"]]) for run in _named(runs, name) if run["seed"] in dense]


def _gap_curves(runs: list[Run], names: list[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By name, tokens and held-out loss above the dense runs of the same seeds, means over these; empty without any."""
    curves = dict.fromkeys(names, (np.empty(0), np.empty(0)))
    for name in names:
        if pairs := _pairs(runs, name):
            compared, dense = zip(*pairs, strict=True)
            (tokens, loss), (dense_tokens, dense_loss) = mean_curve(compared), mean_curve(dense)
            both = tokens <= dense_tokens[-1]
            curves[name] = tokens[both], loss[both] - np.interp(tokens[both], dense_tokens, dense_loss)
    return curves


def mean_curve(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and held-out loss, the mean over runs that are evaluated at the same steps."""
    tokens, losses = np.transpose([run["heldout_curve"] for run in runs], (2, 0, 1))
    return tokens[0], losses.mean(axis=0)


def _sparse_tokens(results: Results) -> tuple[float, float] | None:
    """Where the runs' sparse phase starts and ends, in millions of tokens; None if it is not the same for all."""
    base = results.data["base"]
    settings = [base | run["overrides"] for run in results.data["runs"]]
    windows = {
        (run["sparsity.start_step"], run["sparsity.end_step"])
        for run in settings
        if run.get("sparsity.recipe") != "dense"
    }
    tokens_per_step = base["batch_size"] * base["seq_len"]
    return tuple(step * tokens_per_step / 1e6 for step in windows.pop()) if len(windows) == 1 else None
