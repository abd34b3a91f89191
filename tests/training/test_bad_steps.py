"""Bad steps, by what makes them bad: each leaves no trace but a count."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from sparse_lm.training import step
from sparse_lm.training.step import make_trainer
from sparse_lm.training.transitions import make_transitions
from tests import small

# A mixture: biases of its routers have a rule of their own.
CONFIG = small.config("dense", **small.MIXTURE)


def counts(state):
    return int(state.skipped), int(state.skipped_in_a_row)


def taken(step, state, windows):
    """A step: the state and the metrics after it, and which of weights, moments and the recipe's arrays stayed."""
    before = jax.device_get((state.params, state.opt_state, state.recipe_state))
    state, metrics = step(state, windows)
    assert counts(state) == (metrics["skipped"], metrics["skipped_in_a_row"])
    after = jax.device_get((state.params, state.opt_state, state.recipe_state))
    return state, metrics, jax.tree.map(np.array_equal, before, after)


def test_token_that_the_model_does_not_know():
    """As damaged data would bring it, twice; a good step ends the count of those in a row."""
    dense, _ = small.compiled(CONFIG)
    state, good = dense.init(), small.windows(CONFIG)
    bad = good.copy()
    bad[2, 7] = CONFIG.model.vocab_size + 5
    for expected in ((1, 1), (2, 2)):
        state, metrics, same = taken(dense.steps["dense"], state, bad)
        assert not math.isfinite(metrics["loss"]) and all(jax.tree.leaves(same))
        assert counts(state) == expected
    state, metrics, same = taken(dense.steps["dense"], state, good)
    assert math.isfinite(metrics["loss"]) and not any(jax.tree.leaves(same[0]))
    assert (int(state.step), *counts(state)) == (3, 2, 0)


@pytest.mark.long
def test_one_of_loss_and_gradient_that_is_not_finite(monkeypatch):
    """A term of a sparse step's loss is zero where it has no derivative, and later another one is infinite."""
    config = small.config("sste")
    original = step.forward_loss

    def poisoned(params, recipe_state, windows, key, **kwargs) -> tuple[Array, dict]:
        loss, stats = original(params, recipe_state, windows, key, **kwargs)
        weight = params["layers"]["ffn"]["up"][0, 0, 0].astype(jnp.float32)
        bad = windows[0, 0] == 1
        return loss + jnp.sqrt(jnp.where(bad, weight * 0, 1)) - ~bad + jnp.where(windows[0, 0] == 2, jnp.inf, 0), stats

    monkeypatch.setattr(step, "forward_loss", poisoned)
    trainer = make_trainer(config)
    transitions = make_transitions(config, trainer.graphdef)
    state, _ = transitions["enter"](trainer.init(), small.windows(config))
    for number, first_token, expected in ((0, 0, (0, 0)), (1, 1, (1, 1)), (2, 0, (1, 0)), (3, 2, (2, 1))):
        windows = small.windows(config, number)
        windows[0, 0] = first_token
        state, metrics, same = taken(trainer.steps["sparse"], state, windows)
        assert math.isfinite(metrics["loss"]) == (first_token != 2)
        assert math.isfinite(metrics["grad_norm"]) == (first_token != 1)
        assert counts(state) == expected
        assert all(jax.tree.leaves(same)) == (first_token > 0)


def test_bad_shard_of_a_batch_is_bad_for_every_device():
    config = small.config("dense", batch_size=8, **{"mesh.data": 4, "mesh.fsdp": 2})
    trainer = make_trainer(config)
    state, windows = trainer.init(), small.windows(config)
    windows[7, 3] = config.model.vocab_size + 5  # of the last of eight devices
    state, _, same = taken(trainer.steps["dense"], state, trainer.layout.place_rows(windows))
    assert all(jax.tree.leaves(same))
    for count in (state.skipped, state.skipped_in_a_row):
        assert [int(shard.data) for shard in count.addressable_shards] == [1] * 8
