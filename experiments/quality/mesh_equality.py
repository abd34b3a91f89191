"""Compares what a mesh trains with what one device trains: every recipe on 8 simulated CPU devices, 20 steps.

    python -m experiments.quality.mesh_equality --output=experiments/results/mesh_equality_cpu.json

One device takes the parts of a step as microbatches one after the other; a mesh has them side by side. What is written
is the largest difference between their losses, relative to the loss, in the dense steps, the sparse ones and the dense
ones that follow. Where only sequences are split (8x1x1, 1x8x1) it is rounding, and near ties between neurons that
rounding decides. With heads and neurons split as well (2x2x2) sums have another order, so that a near tie between
weights or neurons may be decided otherwise; random 2:4 draws other numbers on each device, and the busiest neurons
(act24) are chosen within the neurons of each device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from absl import app

from experiments.result_files import write_results
from sparse_lm import config as config_lib
from sparse_lm.config import Config
from sparse_lm.training.step import Trainer, TrainState, make_trainer
from sparse_lm.training.transitions import make_transitions, transition_before

RECIPES: dict[str, dict[str, float]] = {
    "dense": {},
    "fst": {"mask_decay": 1e-4},
    "sste": {},
    "act24": {},
    "venom": {"v": 16, "m": 8, "experts": 4},
    "slices": {"v": 16, "m": 8},
    "dense_slices": {"v": 16},
    "experts24": {"v": 16},
}
MIXTURES = ("experts24",)  # of which `tensor` splits no experts
MESHES = ((8, 1, 1), (1, 8, 1), (2, 2, 2))
START, END, STEPS = 6, 13, 20


def make_config(recipe: str, mesh: tuple[int, int, int], microbatches: int) -> Config:
    config = config_lib.default()
    config.update(steps=STEPS, batch_size=16, microbatches=microbatches, seq_len=32, log_every=1)
    config.model.update(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=512, vocab_size=320, dtype="float32")
    config.model.loss_chunk = 64
    if recipe in MIXTURES:
        config.model.update(experts=8, expert_dim=64)
    config.optimizer.update(learning_rate=1e-2, warmup_steps=2)
    config.sparsity.update(recipe=recipe, start_step=START, end_step=END, refresh_every=2, **RECIPES[recipe])
    config.mesh.update(dict(zip(("data", "fsdp", "tensor"), mesh, strict=True)))
    return config_lib.parse(config)


def take_steps(
    config: Config, trainer: Trainer, transitions: dict[str, Callable], batches: Iterable[np.ndarray]
) -> tuple[TrainState, list[dict[str, Any]]]:
    """Returns the last state, and the metrics of each step, through both transitions."""
    place = trainer.layout.place_batch if trainer.layout else jax.device_put
    state, trace = trainer.init(), []
    for step, windows in enumerate(map(place, batches)):
        if transition := transition_before(config, step):
            state, _ = transitions[transition](state, windows)
        state, metrics = trainer.steps[config.phase(step)](state, windows)
        trace.append(jax.device_get(metrics))
    return state, trace


def _windows(config: Config, step: int) -> np.ndarray:
    """Draws int32[B, S + 1]: each token follows from the one before, nine times in ten."""
    rng = np.random.default_rng(step)
    tokens = rng.integers(config.model.vocab_size, size=(config.batch_size, config.seq_len + 1), dtype=np.int32)
    for i in range(config.seq_len):
        follows = rng.random(config.batch_size) < 0.9
        tokens[:, i + 1] = np.where(follows, (tokens[:, i] * 7 + 3) % config.model.vocab_size, tokens[:, i + 1])
    return tokens


def main(_: Sequence[str]) -> None:
    jax.config.update("jax_num_cpu_devices", 8)

    def trained(config: Config) -> np.ndarray:
        trainer = make_trainer(config)
        transitions = make_transitions(config, trainer.graphdef, trainer.layout)
        _, trace = take_steps(config, trainer, transitions, (_windows(config, step) for step in range(STEPS)))
        return np.array([float(metrics["loss"]) for metrics in trace])

    table: dict[str, dict[str, dict[str, float]]] = {}
    alone: dict[tuple[str, int], np.ndarray] = {}
    for recipe in RECIPES:
        for mesh in (mesh for mesh in MESHES if mesh[2] == 1 or recipe not in MIXTURES):
            parts = mesh[0] * mesh[1]
            if (recipe, parts) not in alone:
                alone[recipe, parts] = trained(make_config(recipe, (1, 1, 1), parts))
            expected = alone[recipe, parts]
            difference = np.abs(trained(make_config(recipe, mesh, 1)) / expected - 1)
            phases = dict(before=difference[:START], sparse=difference[START:END], after=difference[END:])
            row = {phase: float(values.max()) for phase, values in phases.items()}
            row["first_sparse_step"] = float(difference[START])
            table.setdefault(recipe, {})["x".join(map(str, mesh))] = row
            print(recipe, mesh, row, flush=True)
            write_results(steps=STEPS, sparse=(START, END), relative_difference_of_losses=table)


if __name__ == "__main__":
    app.run(main)
