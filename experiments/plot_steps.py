"""Figures of whole training steps: their time by recipe and by part of the model, and what the speed costs in loss."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from matplotlib.figure import Figure

from configs import llama60m
from experiments.plot_losses import final_gaps, mean_curve
from experiments.plot_results import Results, limit, new_figure
from sparse_lm.config import SparsityConfig
from sparse_lm.reporting.style import GREY


def whole_steps(results: Results) -> Figure:
    """Time of a step by recipe, from the results of one step to those of the next; coloured by part of the
    model where kernels were timed."""
    recipes, pytorch = results.data["recipes"], results.beside("step_torch")
    rival = _same_model(pytorch.data, results) if pytorch else None
    names, times = list(recipes), [row["step_ms"] for row in recipes.values()]
    caption = f"{results.caption}; {pytorch.name}.json" if rival else results.caption
    figure, axes = new_figure(9, 1.5 + 0.35 * len(names), caption)
    axes.barh(names, times, color=GREY, alpha=0.3)
    by_part = {name: row.get("ms_by_part", {}) for name, row in recipes.items()}
    parts = list(dict.fromkeys(part for milliseconds in by_part.values() for part in milliseconds))
    starts = dict.fromkeys(names, 0.0)
    for i, part in enumerate(parts):
        widths = [by_part[name].get(part, {"total": 0.0})["total"] for name in names]
        axes.barh(names, widths, 0.5, list(starts.values()), color=f"C{i % 8}", alpha=1 - 0.3 * (i // 8), label=part)
        starts = {name: starts[name] + width for name, width in zip(names, widths, strict=True)}
    for i, ms in enumerate(times):
        text = f"{ms:.0f} ms"
        if "dense" in recipes:
            text += f", {recipes['dense']['step_ms'] / ms:.2f} times"
        axes.annotate(text, (ms, i), xytext=(4, 0), textcoords="offset points", va="center")
    if rival:
        limit(axes, rival["step_ms"], "PyTorch, dense")
    if parts:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(right=1.35 * max(times))
    axes.set_xlabel("time of a step (ms); speed-up over dense")
    axes.set_title(_what(results), pad=16)
    return figure


def frontier(quality: Results, steps: Results) -> Figure:
    """What recipes cost in final held-out loss against how much faster whole runs are at measured step times."""
    gaps = final_gaps(quality)
    figure, axes = new_figure(8.5, 4, f"{quality.caption}; {steps.caption}")
    axes.axhline(0, color=GREY, linestyle="--", linewidth=1)
    # Of those with a dense run of their seeds.
    speedups = {name: speedup for name, speedup in speedups_of_runs(quality, steps).items() if name in gaps}
    for i, (name, speedup) in enumerate(speedups.items()):
        marker = "os^"[i // 8 % 3]  # there are eight colours
        mean, deviation = statistics.fmean(gaps[name]), statistics.stdev(gaps[name]) if len(gaps[name]) > 1 else 0
        axes.errorbar(speedup, mean, deviation, fmt=marker, capsize=3, label=f"{name}: {mean:+.3f}")
    axes.margins(x=0.1, y=0.15)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.set(xlabel=f"speed-up of the run (times), {_what(steps)}", ylabel="loss above dense (nats per token)")
    return figure


def losses_over_time(quality: Results, steps: Results) -> Figure:
    """Held-out loss, the mean over seeds, by time at measured step times: the later part of the dense run's."""
    runs, tokens_per_step = quality.data["runs"], quality.data["base"]["batch_size"] * quality.data["base"]["seq_len"]
    clocks = clocks_of_runs(quality, steps)
    whole = clocks["dense"].time(clocks["dense"].steps)
    figure, axes = new_figure(8.5, 4, f"{quality.caption}; {steps.caption}")
    for name, clock in clocks.items():
        tokens, loss = mean_curve([run for run in runs if run["name"] == name])
        times = [clock.time(count / tokens_per_step) / whole for count in tokens]
        axes.plot(times, loss, marker=".", label=f"{name}: {loss[-1]:.3f}")
    final = [line.get_ydata()[-1] for line in axes.lines]
    axes.set(xlim=(0.4, 1.05), ylim=(min(final) - 0.02, max(final) + 0.4))
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.set(xlabel=f"time, of the dense run's, {_what(steps)}", ylabel="held-out loss (nats per token)")
    return figure


@dataclasses.dataclass(frozen=True)
class Clock:
    """The time that a run takes, in dense steps.

    Attributes:
      steps: of the run.
      sparse: its first sparse step and the one after its last.
      sparse_step: the time of one.
    """

    steps: int
    sparse: tuple[int, int]
    sparse_step: float

    def time(self, steps: float) -> float:
        """Of the run's first `steps` steps."""
        start, end = self.sparse
        return steps - (1 - self.sparse_step) * max(0, min(steps, end) - start)


def clocks_of_runs(quality: Results, steps: Results) -> dict[str, Clock]:
    """By the names of runs whose recipe was timed.

    A run and a timed recipe belong together if they choose what is sparse alike, whatever the shapes of
    their models. Layers that a run leaves dense take a dense step's time.
    """
    recipes = steps.data["recipes"]
    relative_times = {
        _choice(row["sparsity"]): row["step_ms"] / recipes["dense"]["step_ms"]
        for row in recipes.values()
        if not row["sparsity"].get("dense_layers")
    }
    layers = llama60m.get_config().model.layers  # of all suites
    clocks = {}
    for run in quality.data["runs"]:
        settings = quality.data["base"] | run["overrides"]
        if settings.get("sparsity.stages") or settings.get("sparsity.extra_windows"):
            continue  # a clock has one sparse phase, with steps of one kind
        choice = _choice({key.removeprefix("sparsity."): value for key, value in settings.items()})
        if choice in relative_times:
            sparse = settings["sparsity.start_step"], settings["sparsity.end_step"]
            dense_share = settings.get("sparsity.dense_layers", 0) / layers
            sparse_step = dense_share + (1 - dense_share) * relative_times[choice]
            clocks[run["name"]] = Clock(settings["steps"], sparse, sparse_step)
    return clocks


def speedups_of_runs(quality: Results, steps: Results) -> dict[str, float]:
    """Of whole runs over the dense one, by name. Of other dense runs only those that take less time."""
    clocks = clocks_of_runs(quality, steps)
    whole = clocks["dense"].steps
    times = {name: clock.time(clock.steps) for name, clock in clocks.items()}
    return {
        name: whole / time
        for name, time in times.items()
        if name == "dense" or clocks[name].sparse_step != 1 or time < whole
    }


def _what(results: Results) -> str:
    model, tokens = results.data["model"], results.data["batch_size"] * results.data["seq_len"]
    gpus = math.prod(results.data.get("mesh", {}).values())
    spread = f" on {gpus} GPUs" if gpus > 1 else ""
    return f"D {model['dim']}, F {model['ffn_dim']}, {model['layers']} layers, {tokens} tokens{spread}"


def _same_model(rows: list[dict[str, Any]], results: Results) -> dict[str, Any] | None:
    """The row of the same model and batch, if there is one."""
    wanted = results.data["model"] | {"batch_size": results.data["batch_size"]}
    keys = ("dim", "layers", "vocab_size", "batch_size")
    return next((row for row in rows if all(row[key] == wanted[key] for key in keys)), None)


def _choice(sparsity: dict[str, Any]) -> tuple:
    """What decides how fast a recipe is: its name and, of Venom, how columns and tokens are chosen, and how many."""
    known = {field.name for field in dataclasses.fields(SparsityConfig)} & sparsity.keys()
    s = SparsityConfig(**{name: sparsity[name] for name in known})
    if s.recipe != "venom":
        return (s.recipe,)
    v = s.v if s.selection == "magnitude" else None  # sets of any runs are clocked as those that were timed
    return s.recipe, s.selection, s.m, v, s.neuron_run > 1, s.weight_gradients
