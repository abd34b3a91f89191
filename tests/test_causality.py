"""No output may depend on a later token of its own sequence.

The test perturbs the inputs from some position on and looks at what comes before it. Everything that
a recipe decides from one token alone (weights, 2:4 of a row, a token's cluster) passes exactly. The
one decision that looks at several tokens is `magnitude`'s choice of columns for a block of v rows in
training: there the test pins down what the design promises, that nothing outside the blocks of the
perturbed tokens moves and that blocks are mixed at random.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.model import llama
from sparse_lm.ops import ffn, ffn_weights
from sparse_lm.ops.plan import DENSE, RECIPES
from tests import small

PERTURBED = 20  # the first position that changes, of 32


def outputs_of_two(recipe, plan_of):
    """Hidden states of a batch and of the same batch with all tokens from PERTURBED on replaced."""
    config = small.config(recipe, batch_size=3, **{"sparsity.v": 32})
    trainer, _ = small.compiled(config)
    state = trainer.init() if recipe == "dense" else small.entered(config)
    tokens = small.windows(config)
    inputs = tokens[:, :-1]
    changed = inputs.copy()
    changed[:, PERTURBED:] = (inputs[:, PERTURBED:] + 1) % config.model.vocab_size
    forward = jax.jit(
        lambda tokens: llama.merge(trainer.graphdef, state.params)(
            tokens, plan=plan_of(trainer.plan), variables=state.variables, key=jax.random.key(3)
        )[0]
    )
    return np.asarray(forward(inputs)), np.asarray(forward(changed))


def assert_causal(before, after):
    # Rows move to other places in the batch, where XLA may sum in another order.
    np.testing.assert_allclose(before[:, :PERTURBED], after[:, :PERTURBED], rtol=1e-4, atol=1e-5)
    assert np.abs(before[:, PERTURBED:] - after[:, PERTURBED:]).max() > 0.1


@pytest.mark.parametrize("recipe", [r for r in small.RECIPES if r != "venom"])
def test_training_forward_is_causal(recipe):
    assert_causal(*outputs_of_two(recipe, lambda plan: plan))


@pytest.mark.parametrize("recipe", small.RECIPES)
def test_sparse_evaluation_is_causal(recipe):
    assert_causal(*outputs_of_two(recipe, lambda plan: plan.for_evaluation()))


def test_dense_evaluation_is_causal():
    assert_causal(*outputs_of_two("venom", lambda plan: DENSE))


def magnitude(v, dim, neurons):
    """A plan whose blocks of v rows share columns, and a function to random weights, centres and an order of tokens."""
    plan = dataclasses.replace(RECIPES["venom"], v=v, m=16, clusters=2)

    def draw(key, tokens):
        keys = jax.random.split(key, 5)
        w1, w2 = (jax.random.normal(k, (neurons, dim)) for k in keys[:2])
        centroids = jax.random.normal(keys[2], (plan.clusters, dim))
        variables = dataclasses.replace(ffn_weights.init_variables(plan, dim, neurons), centroids=centroids)
        return jax.random.normal(keys[3], (tokens, dim)), w1, w2, variables, jax.random.permutation(keys[4], tokens)

    return plan, draw


def blocks(plan, x, variables, order):
    """The block of each token."""
    return ffn.arrange_rows(x, variables, order, plan)[0].position // plan.v


def test_magnitude_in_training_stays_within_blocks():
    """A changed token moves the outputs of the tokens that share a block with it, and of no others."""
    plan, draw = magnitude(v=16, dim=16, neurons=64)
    x, w1, w2, variables, order = jax.jit(draw, static_argnames="tokens")(jax.random.key(0), tokens=256)
    apply = jax.jit(lambda x: ffn.feed_forward(x, w1, w2, variables, order=order, plan=plan)[0])
    block = np.asarray(jax.jit(blocks, static_argnums=0)(plan, x, variables, order))
    after = apply(x.at[100].multiply(3.0))  # its direction, so its cluster and its block, stays
    moved = np.abs(np.asarray(after) - apply(x)).max(axis=1) > 1e-5
    np.testing.assert_array_equal(moved & (block != block[100]), False)
    assert moved[100]


def test_magnitude_in_training_mixes_neighbours():
    """A token's block holds its neighbours no more often than chance would have it: about v / T."""
    plan, draw = magnitude(v=16, dim=16, neurons=64)

    @jax.jit
    def share_of_neighbours(key):
        x, _, _, variables, order = draw(key, tokens=512)
        block = blocks(plan, x, variables, order)
        return jnp.mean(block[1:] == block[:-1])

    shared = [float(share_of_neighbours(jax.random.key(seed))) for seed in range(20)]
    assert np.mean(shared) < 2.5 * 16 / 512  # two clusters: chance is about 2 v / T
