"""The benchmark of experts at a size for CPUs: recipes have outputs and gradients, and loads are as they are said."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

SHAPE = dict(tokens=512, dim=64, experts=4, width=64, choices=2)


@pytest.fixture
def bench(script):
    return script("experiments.bench.experts")


def test_sparse_experts_are_near_dense_ones_and_gradients_are_finite(bench):
    operands = bench.random_operands(**SHAPE, skew=0.5, dtype=jnp.float32)
    outputs = {}
    for name in ("dense", "experts24"):
        recipe = bench.RECIPES[name]()
        state, _ = recipe.enter(operands.w1, operands.w2)
        results = jax.jit(functools.partial(bench.both, recipe, 4))(operands, state)
        forward = jax.jit(functools.partial(bench.forward, recipe, 4))(operands, state)
        np.testing.assert_allclose(results[0], forward, rtol=1e-5, atol=1e-5)
        assert [a.shape for a in results] == [(512, 64), (512, 64), (256, 64), (256, 64), (512, 2)]
        assert all(jnp.isfinite(a).all() and jnp.any(a) for a in results)
        outputs[name] = np.ravel(forward)
    assert np.corrcoef(*outputs.values())[0, 1] > 0.5


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_loads_are_as_even_as_is_asked_for(bench, skew):
    chosen = bench.random_operands(**SHAPE | dict(experts=16), skew=skew).chosen
    assert all(len(set(row)) == 2 for row in chosen.tolist())
    loads = bench.loads(chosen, 16)
    if skew:
        assert loads["busiest"] > 2 and loads["idlest"] < 0.5
    else:
        assert 1 < loads["busiest"] < 1.5 and 0.6 < loads["idlest"] < 1
