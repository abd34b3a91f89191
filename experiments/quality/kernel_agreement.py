r"""Compares training on the kernels with training on the reference, through the end of a sparse phase.

From one state, taken where the sparse phase starts: sparse steps, the flip out, dense steps. Four times:
on the kernels, on the reference, on the reference again, and on the reference with every sum of a product
in two halves. The last two show how far runs drift apart that differ in the order of summation alone.

    python -m experiments.quality.kernel_agreement --config=configs/llama60m.py --config.data.path=data/corpus \
        --output=experiments/results/kernel_agreement_h100.json

The configuration says where the sparse phase starts and ends, and how many dense steps follow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from ml_collections import config_flags

from experiments.result_files import write_results
from sparse_lm import config as config_lib
from sparse_lm.data.opening import open_data
from sparse_lm.data.pipeline import train_batches
from sparse_lm.ops import reference
from sparse_lm.training.step import TrainState, make_trainer
from sparse_lm.training.transitions import make_transitions, needs_refresh

CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)


@contextlib.contextmanager
def sums_in_two_halves() -> Iterator[None]:
    """Makes the reference sum its products in two halves of the contracted dimension."""
    whole = reference._dot

    def halves(a, b):
        middle = b.shape[0] // 2
        return whole(a[:, :middle], b[:middle]) + whole(a[:, middle:], b[middle:])

    with mock.patch.object(reference, "_dot", halves):
        yield


def losses(config: config_lib.Config, state: TrainState, batches: list[np.ndarray]) -> list[float]:
    """Returns the loss of every step from the start of the sparse phase on; `state` is consumed."""
    trainer = make_trainer(config)
    transitions = make_transitions(config, trainer.graphdef)
    start, end = config.sparsity.start_step, config.sparsity.end_step
    curve = []
    for step, windows in enumerate(batches, start):
        if step == start:
            state = transitions.enter_sparse(state, windows)
        elif needs_refresh(config, step):
            state, _ = transitions.refresh(state, windows)
        elif step == end:
            state = transitions.leave_sparse(state)
        state, metrics = trainer.step(config.phase(step))(state, windows)
        curve.append(float(metrics["loss"]))
    return curve


def main(_) -> None:
    config = config_lib.parse(CONFIG.value)
    data = open_data(config)
    stream = train_batches(data, batch_size=config.batch_size, seed=config.seed)
    trainer = make_trainer(config)
    state = trainer.init()
    for windows in itertools.islice(stream, config.sparsity.start_step):
        state, _ = trainer.step("dense")(state, windows)
    batches = list(itertools.islice(stream, config.steps - config.sparsity.start_step))

    def run(implementation: str | None) -> list[float]:
        recipe = dataclasses.replace(config.sparsity.recipe, implementation=implementation)
        sparsity = dataclasses.replace(config.sparsity, recipe=recipe)
        return losses(dataclasses.replace(config, sparsity=sparsity), jax.tree.map(jnp.copy, state), batches)

    curves = {"kernels": run(None), "reference": run("reference"), "reference_again": run("reference")}
    with sums_in_two_halves():
        curves["reference_in_halves"] = run("reference")

    sparse_steps = config.sparsity.end_step - config.sparsity.start_step
    table = {}
    for name, curve in curves.items():
        apart = np.abs(np.subtract(curve, curves["reference"]))
        table[name] = dict(sparse=float(apart[:sparse_steps].max()), dense=float(apart[sparse_steps:].max()))
        print(
            f"{name}: at most {table[name]['sparse']:.2e} sparse, {table[name]['dense']:.2e} dense from the reference"
        )
    sparsity = config_lib.to_dict(config)["sparsity"]
    write_results(OUTPUT.value, dict(sparsity=sparsity, largest_difference_from_reference=table, losses=curves))


if __name__ == "__main__":
    app.run(main)
