r"""Compares training on the kernels with training on the reference, through the end of a sparse phase.

From one state, taken where the sparse phase starts: sparse steps, the flip out, dense steps. Four times:
on the kernels, on the reference, on the reference again, and on the reference with every sum of a product
in two halves. The last two show how far runs drift apart that differ in the order of summation alone.

    python -m experiments.quality.kernel_agreement --config=configs/llama60m.py --config.data.path=data/corpus \
        --output=experiments/results/kernel_agreement_h200.json

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

from experiments.quality.mesh_equality import losses
from experiments.result_files import write_results
from sparse_lm import config as config_lib
from sparse_lm.data.opening import open_data
from sparse_lm.data.pipeline import train_batches
from sparse_lm.ops import reference
from sparse_lm.training.step import make_trainer


@contextlib.contextmanager
def sums_in_two_halves() -> Iterator[None]:
    """Makes the reference sum its products in two halves of the contracted dimension."""
    whole = reference._dot

    def halves(a, b):
        middle = b.shape[0] // 2
        return whole(a[:, :middle], b[:middle]) + whole(a[:, middle:], b[middle:])

    with mock.patch.object(reference, "_dot", halves):
        yield


def main(_) -> None:
    config = config_lib.parse(flags.FLAGS.config)
    stream = train_batches(open_data(config), batch_size=config.batch_size, seed=config.seed)
    trainer = make_trainer(config)
    state = trainer.init()
    for windows in itertools.islice(stream, config.sparsity.start_step):
        state, _ = trainer.steps["dense"](state, windows)
    batches = list(itertools.islice(stream, config.steps - config.sparsity.start_step))

    def run(implementation: str | None) -> np.ndarray:
        recipe = dataclasses.replace(config.sparsity.recipe, implementation=implementation)
        sparsity = dataclasses.replace(config.sparsity, recipe=recipe)
        changed = dataclasses.replace(config, sparsity=sparsity)
        return losses(changed, batches, jax.tree.map(jnp.copy, state), config.sparsity.start_step)

    curves = {"kernels": run(None), "reference": run("reference"), "reference_again": run("reference")}
    with sums_in_two_halves():
        curves["reference_in_halves"] = run("reference")

    sparse_steps = config.sparsity.end_step - config.sparsity.start_step
    table = {}
    for name, curve in curves.items():
        apart = np.abs(curve - curves["reference"])
        table[name] = dict(sparse=float(apart[:sparse_steps].max()), dense=float(apart[sparse_steps:].max()))
        print(
            f"{name}: at most {table[name]['sparse']:.2e} sparse, {table[name]['dense']:.2e} dense from the reference"
        )
    write_results(
        sparsity=config_lib.to_dict(config)["sparsity"],
        largest_difference_from_reference=table,
        losses={name: curve.tolist() for name, curve in curves.items()},
    )


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
    app.run(main)
