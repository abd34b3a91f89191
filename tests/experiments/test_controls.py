"""The recipes that are there to be compared with: each does what its name says."""

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lm.ops import backends
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


def test_rounded_slices_multiply_what_e4m3_holds(monkeypatch):
    keys = jax.random.split(jax.random.key(0), 4)
    w1, w2 = (jax.random.normal(key, (256, 64)) / 8 for key in keys[:2])
    x, do = (jax.random.normal(key, (512, 64), jnp.bfloat16) for key in keys[2:])
    multiplied, dispatch = [], backends.dispatch

    def watched(op, implementation, *operands, **options):
        if "matmul" in op:
            multiplied.extend(getattr(operand, "values", operand) for operand in operands[:2])
        return dispatch(op, implementation, *operands, **options)

    monkeypatch.setattr(backends, "dispatch", watched)

    def share_held(recipe):
        """Computes the smallest share of an operand's numbers that have no more than the four bits of e4m3."""

        @jax.jit
        def operands(w1, w2):
            state, order = recipe.enter(w1, w2, x)
            multiplied.clear()
            _, gradients = jax.vjp(lambda *arrays: recipe.ffn(*arrays, state, key=keys[0])[0], x, w1[order], w2[order])
            gradients(do)
            return multiplied

        found = operands(w1, w2)
        assert len(found) == 2 * len(recipe.products)
        mantissas = (np.frexp(np.asarray(operand, np.float32))[0] for operand in found)
        return min(np.mean(16 * mantissa == np.round(16 * mantissa)) for mantissa in mantissas)

    assert share_held(RECIPES["fp8_slices"](v=64)) == 1
    assert share_held(RECIPES["slices"](v=64)) < 0.5
