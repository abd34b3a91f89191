"""The recipes that are there to be compared with: each does what its name says."""

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lm.recipes import RECIPES


def test_without_a_router_all_tokens_have_the_first_slice():
    keys = jax.random.split(jax.random.key(0), 3)
    w1, w2, x = (jax.random.normal(key, (size, 32)) for key, size in zip(keys, (256, 256, 512), strict=True))
    recipe = RECIPES["fixed_quarter"](v=16)
    state, order = jax.jit(recipe.enter)(w1, w2, x)
    o, stats = jax.jit(recipe.ffn)(x, w1, w2, state)
    assert order is None and not recipe.refreshes
    np.testing.assert_array_equal(stats["expert_load"], [1, 0, 0, 0])
    others = jnp.arange(256)[:, None] >= 64
    np.testing.assert_array_equal(o, jax.jit(recipe.ffn)(x, jnp.where(others, 7.0, w1), w2, state)[0])
