"""Figures of whole training steps: their time by recipe and by part of the model, and what the speed costs in loss."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from matplotlib.figure import Figure

from experiments.plot_losses import final_gaps
from experiments.plot_results import GREY, Results, new_figure
from sparse_lm.config import SparsityConfig


def whole_steps(results: Results) -> Figure:
    """Time of a step by recipe, from the results of one step to those of the next; coloured by part of the
    model where kernels were timed."""
    recipes = results.data["recipes"]
    names, dense = list(recipes), recipes["dense"]["step_ms"]
    figure, axes = new_figure(9, 2.2 + 0.3 * len(names), results.caption)
    times = [row["step_ms"] for row in recipes.values()]
    axes.barh(names, times, color=GREY, alpha=0.3, label="everything")
    by_part = {name: row.get("ms_by_part", {}) for name, row in recipes.items()}
    starts = dict.fromkeys(names, 0.0)
    for i, part in enumerate(dict.fromkeys(part for parts in by_part.values() for part in parts)):
        widths = [by_part[name].get(part, 0.0) for name in names]
        axes.barh(names, widths, 0.5, list(starts.values()), color=f"C{i % 8}", alpha=1 - 0.3 * (i // 8), label=part)
        starts = {name: starts[name] + width for name, width in zip(names, widths, strict=True)}
    for i, ms in enumerate(times):
        axes.annotate(
            f"{ms:.0f} ms, {dense / ms:.2f} times", (ms, i), xytext=(4, 0), textcoords="offset points", va="center"
        )
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(right=1.35 * max(times))
    axes.set(xlabel="time of a step (ms); speed-up over dense", title=_what(results))
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def frontier(quality: Results, steps: Results) -> Figure:
    """What recipes cost in final held-out loss against how much faster their steps were measured to be.

    A run of the suite and a recipe of the benchmark belong together if they choose what is sparse alike,
    whatever the shapes of their models.
    """
    recipes = steps.data["recipes"]
    milliseconds = {_choice(row["sparsity"]): row["step_ms"] for row in recipes.values()}
    gaps = final_gaps(quality)
    figure, axes = new_figure(7.5, 4, f"{quality.caption}; {steps.caption}")
    axes.axhline(0, color=GREY, linestyle="--", linewidth=1)
    for run in {run["name"]: run for run in quality.data["runs"]}.values():
        choice = _choice({key.removeprefix("sparsity."): value for key, value in run["overrides"].items()})
        if choice in milliseconds:
            gap = gaps[run["name"]]
            at = recipes["dense"]["step_ms"] / milliseconds[choice], statistics.fmean(gap)
            axes.errorbar(*at, statistics.stdev(gap) if len(gap) > 1 else 0, fmt="o", capsize=3)
            axes.annotate(run["name"], at, xytext=(6, 4), textcoords="offset points", fontsize="small")
    axes.margins(x=0.2, y=0.15)
    axes.set(xlabel=f"speed-up of a sparse step (times), {_what(steps)}", ylabel="loss above dense (nats per token)")
    return figure


def _what(results: Results) -> str:
    model, tokens = results.data["model"], results.data["batch_size"] * results.data["seq_len"]
    return f"D {model['dim']}, F {model['ffn_dim']}, {model['layers']} layers, {tokens} tokens"


def _choice(sparsity: dict[str, Any]) -> tuple:
    """What decides how fast a recipe is: its name and, of Venom, how and how many columns are chosen."""
    known = {field.name for field in dataclasses.fields(SparsityConfig)} & sparsity.keys()
    s = SparsityConfig(**{name: sparsity[name] for name in known})
    return (s.recipe, s.selection, s.m, s.neuron_run > 1) if s.recipe == "venom" else (s.recipe,)
