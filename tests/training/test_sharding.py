"""Runs on a mesh of eight simulated devices are the run of one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from sparse_lm.training.flip import make_transitions, needs_refresh
from sparse_lm.training.step import make_trainer
from tests import small


def config(recipe, mesh=(1, 1, 1), **changes):
    """20 steps, sparse on 6..13; shards of 64 neurons."""
    size = {"steps": 20, "batch_size": 16, "model.ffn_dim": 512, "sparsity.start_step": 6, "sparsity.end_step": 13}
    return small.config(
        recipe, **size, **dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), mesh, strict=True)), **changes
    )


@functools.cache
def trainer_of(config):
    return make_trainer(config)


def batch(trainer, step):
    windows = small.windows(trainer.config, step)
    return trainer.layout.place_rows(windows) if trainer.layout else windows


def train(config, state=None, steps=None):
    """The state after `steps`, and the metrics of each: what the training loop does, less its files."""
    trainer = trainer_of(config)
    transitions = make_transitions(config, trainer.plan, trainer.graphdef, trainer.layout)
    state = trainer.init() if state is None else state
    first, trace = int(state.step), []
    for step in range(first, steps or config.steps):
        before, now = config.phase(step - 1) if step else "dense", config.phase(step)
        windows = batch(trainer, step)
        if (before, now) == ("dense", "sparse"):
            state = transitions.enter_sparse(state, windows)
        elif (before, now) == ("sparse", "dense"):
            state = transitions.leave_sparse(state)
        elif now == "sparse" and needs_refresh(trainer.plan) and step % config.sparsity.refresh_every == 0:
            state, _ = transitions.refresh(state, windows)
        if now == "sparse" and trainer.plan.weights == "transposable":
            state = dataclasses.replace(state, mask_decay=np.float32(1e-4))
        state, metrics = trainer.step(now)(state, windows)
        trace.append(jax.device_get(metrics))
    return state, trace


@pytest.mark.parametrize("recipe, mesh", [("venom", (8, 1, 1)), ("fst", (1, 8, 1)), ("cluster_sets", (2, 2, 2))])
def test_mesh_takes_the_steps_of_one_device(recipe, mesh):
    """One device goes through the parts of a step one after the other, the mesh has them side by side."""
    _, alone = train(config(recipe, microbatches=mesh[0] * mesh[1]))
    state, meshed = train(config(recipe, mesh))
    # Along `tensor` sums have another order, and now and then a near tie is decided otherwise; shares are means of
    # the shards' shares. The first sparse step is compared closely, the loss of those that follow it less so.
    compared, tolerance = (len(alone), 1e-5) if mesh[2] == 1 else (7, 1e-4)
    for name in alone[6]:
        series = [[step[name] for step in trace[:compared] if name in step] for trace in (alone, meshed)]
        np.testing.assert_allclose(*(np.array(s, float) for s in series), rtol=tolerance, atol=tolerance, err_msg=name)
    losses = [[step["loss"] for step in trace] for trace in (alone, meshed)]
    np.testing.assert_allclose(*losses, rtol=30 * tolerance)
    for leaf in jax.tree.leaves((state.variables, state.step, state.skipped)):
        copies = {}
        for shard in leaf.addressable_shards:
            same = copies.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(same, shard.data)
