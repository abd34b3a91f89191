r"""Times the whole training step, dense and each recipe in turns in one process, on the run's real code.

    python -m experiments.bench.step --config=configs/llama1b.py --config.sparsity.dense_layers=0 \
        --output=experiments/results/step_llama1b_h200.json

    python -m experiments.bench.step --config=configs/llama1b.py --recipes=dense,dense_within_documents \
        --output=experiments/results/step_llama1b_within_documents_h200.json

    NCCL_NVLS_ENABLE=0 python -m experiments.bench.step --config=configs/llama7b.py --config.mesh.fsdp=4 \
        --config.batch_size=16 --recipes=dense,slices --traced=0 \
        --output=experiments/results/step_llama7b_fsdp_4_h200.json

Recipes take turns, round by round, on one shared state, which enters each recipe's sparse phase anew. Layers that the
configuration keeps dense (`sparsity.dense_layers`) are dense here. Tokens are random and already on the device. A
step's time is that between the arrivals of its results and of those of the step before, with the next step already
dispatched, as in training (`experiments.timing`). The results are written after every round.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import app, flags
from jax import Array
from ml_collections import config_flags

from experiments.bench import step_parts
from experiments.result_files import show, write_results
from experiments.timing import compile_side_by_side, peak_gib, time_steps
from sparse_lm import recipes
from sparse_lm.config import Config, default, parse
from sparse_lm.training.environment import request_memory
from sparse_lm.training.step import Trainer, TrainState, make_trainer
from sparse_lm.training.telemetry import flops
from sparse_lm.training.transitions import make_transitions

RECIPES: dict[str, dict[str, Any]] = {  # overrides of `config.sparsity`
    **{name: dict(recipe=name) for name in recipes.RECIPES},
    "slices_2_32": dict(recipe="slices", m=32),
}

WITHIN_DOCUMENTS = "_within_documents"  # at the end of a recipe's name: its attention stays within documents
FP8 = "_fp8"  # likewise: dense products with weights but experts' are in FP8
RECIPES |= {
    name + suffix: RECIPES[name] for name in ("dense", "slices", "slices_2_32") for suffix in (WITHIN_DOCUMENTS, FP8)
} | {"experts24" + FP8: RECIPES["experts24"]}

WARMUP = 2  # steps of each turn that are not timed
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
"""Each kernel is launched for itself: the profiler does not see what CUDA graphs are made of."""


class Variant:
    """A recipe, traced, and after `compile` ready to run. Its sparse phase starts with `enter`."""

    def __init__(self, name: str, base: ml_collections.ConfigDict, state: TrainState, windows: Array):
        self.name = name
        self.config = _with_recipe(base, name)
        self.trainer: Trainer = make_trainer(self.config)
        self.phase = "sparse" if self.config.sparsity.recipe.products else "dense"
        placed = self.trainer.layout.state.recipe_state if self.trainer.layout else None
        self._recipe_state = jax.jit(lambda: self.trainer.init().recipe_state, out_shardings=placed)
        state = self._own(state)
        self._lowered = self.trainer.steps[self.phase].lower(state, windows)
        transitions = make_transitions(self.config, self.trainer.graphdef, self.trainer.layout)
        self._lowered_enter = transitions["enter"].lower(state, windows) if self.phase == "sparse" else None

    def compile(self, traced: bool) -> Variant:
        """Compiles the step, and for the profiler if `traced`, and the transition; `compile_seconds` is the step's."""
        begin = time.perf_counter()
        self.step = self._lowered.compile()
        self.compile_seconds = time.perf_counter() - begin
        self._enter = self._lowered_enter.compile() if self._lowered_enter else None
        self.step_without_graphs = self._lowered.compile(compiler_options=NO_GRAPHS) if traced else None
        print(f"{self.name}: compiled in {self.compile_seconds:.0f} s", flush=True)
        return self

    def enter(self, state: TrainState, windows: Array) -> TrainState:
        """Takes any recipe's state to the first step of this one's phase."""
        state = self._own(state)
        return self._enter(state, windows)[0] if self._enter else state

    def _own(self, state: TrainState) -> TrainState:
        return dataclasses.replace(state, recipe_state=self._recipe_state())


def random_start(base: ml_collections.ConfigDict) -> tuple[Config, TrainState, list[Array]]:
    """Returns the dense configuration, its state before the first step, and four batches on the devices."""
    dense = _with_recipe(base, "dense")
    trainer = make_trainer(dense)
    shape = (dense.batch_size, dense.seq_len + 1)
    tokens = [np.random.default_rng(n).integers(dense.model.vocab_size, size=shape, dtype=np.int32) for n in range(4)]
    place = trainer.layout.place_batch if trainer.layout else jnp.asarray
    return dense, trainer.init(), [place(windows) for windows in tokens]


def _with_recipe(base: ml_collections.ConfigDict, name: str) -> Config:
    changed = ml_collections.ConfigDict(base.to_dict())
    changed.sparsity = default().sparsity  # the base's knobs may be none of this recipe's
    kept = dict(end_step=changed.steps, dense_layers=base.sparsity.dense_layers)
    changed.sparsity.update(kept | RECIPES[name])
    if name.endswith(WITHIN_DOCUMENTS):
        changed.model.document_separator = 0  # of random tokens any will do: a mask costs what it costs
    if name.endswith(FP8):
        changed.model.precision = "fp8"
    return parse(changed)


def profile(
    variant: Variant, state: TrainState, batches: Sequence[Array], steps: int
) -> tuple[TrainState, dict[str, Any]]:
    """Returns the mean milliseconds of a step on a device by part of the model, of kernels that may overlap."""
    step = variant.step_without_graphs
    state, _ = step(state, batches[0])
    jax.block_until_ready(state)
    state, kernels = step_parts.trace_steps(step, state, batches, steps)
    return state, dict(ms_by_part=step_parts.by_part(kernels, step.as_text()))


def summarise(variant: Variant, seconds: list[float]) -> dict[str, Any]:
    """Returns a row of the results, from the timed steps' seconds."""
    config, kind = variant.config, jax.devices()[0].device_kind
    low, median, high = statistics.quantiles(seconds, n=4)
    speed = config.tokens_per_step / median
    utilisation = flops.utilisation(config, config.sparsity.recipe, speed, kind)
    return dict(
        step_ms=1e3 * median,
        step_ms_quartiles=(1e3 * low, 1e3 * high),
        timed_steps=len(seconds),
        tokens_per_second=speed,
        mfu=utilisation["mfu"],
        executed_utilisation=utilisation["executed_utilisation"],
        memory_gib=peak_gib(variant.step),
        compile_seconds=variant.compile_seconds,
        sparsity=RECIPES[variant.name] | dict(dense_layers=config.sparsity.dense_layers),
    )


def main(_: Sequence[str]) -> None:
    values = flags.FLAGS
    base, names = values.config, list(values.recipes)
    request_memory()
    dense, state, batches = random_start(base)
    lowered = (Variant(name, base, state, batches[0]) for name in names)
    compilations = ([functools.partial(variant.compile, values.traced > 0)] for variant in lowered)
    variants = [variant for [variant] in compile_side_by_side(compilations)]

    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(values.rounds):
        for variant in variants:
            state = variant.enter(state, batches[0])
            state, times = time_steps(variant.step, state, batches, warmup=WARMUP, timed=values.steps)
            seconds[variant.name] += times
        table = {variant.name: summarise(variant, seconds[variant.name]) for variant in variants}
        _write(dense, table)
    for variant in variants if values.traced else ():
        state = variant.enter(state, batches[0])
        state, parts = profile(variant, state, batches, values.traced)
        table[variant.name] |= parts
        _write(dense, table)
    _print(table)


def _write(dense: Config, table: dict[str, dict[str, Any]]) -> None:
    write_results(
        batch_size=dense.batch_size,
        seq_len=dense.seq_len,
        mesh=dataclasses.asdict(dense.mesh),
        model=dataclasses.asdict(dense.model),
        peak_gib_of_process=(jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30,
        recipes=table,
    )


def _print(table: dict[str, dict[str, Any]]) -> None:
    for name, row in table.items():
        speedup = {"speedup": table["dense"]["step_ms"] / row["step_ms"]} if "dense" in table else {}
        parts = {part: kernels["total"] for part, kernels in row.get("ms_by_part", {}).items()}
        shown = "step_ms", "tokens_per_second", "mfu", "executed_utilisation", "memory_gib"
        show({"recipe": name} | {key: row[key] for key in shown} | speedup | parts)


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", "configs/llama1b.py", "The dense model, and sparsity.dense_layers.")
    flags.DEFINE_list("recipes", ["dense", "slices", "venom", "act24", "sste", "fst"], "Of RECIPES, by name.")
    flags.register_validator("recipes", lambda names: set(names) <= set(RECIPES), f"must be among {', '.join(RECIPES)}")
    flags.DEFINE_integer("rounds", 3, "Turns of each recipe.", lower_bound=1)
    flags.DEFINE_integer("steps", 8, "Timed steps of each turn; quartiles need two.", lower_bound=2)
    flags.DEFINE_integer("traced", 2, "Steps of each recipe under the profiler, after the timed ones.")
    app.run(main)
