"""The benchmark of experts at a size for CPUs: recipes have outputs and gradients, and loads are as they are said."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import backends

SHAPE = dict(tokens=512, dim=64, experts=4, width=64, choices=2)


@pytest.fixture
def bench(script):
    return script("experiments.bench.experts")


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("name", ["dense", "experts24"])
def test_hopper_runs_all_of_it(bench, name, monkeypatch):
    """At the benchmark's own shapes every operation has a kernel, which lowers on a machine without a GPU."""
    monkeypatch.setattr(backends, "unavailable", lambda name: None if name in ("hopper", "reference") else "absent")
    make = functools.partial(bench.random_operands, 8192, 2048, 16, 4096, 4, 0.0)
    operands, recipe = jax.eval_shape(make), bench.RECIPES[name]()
    state = jax.eval_shape(recipe.init_state, operands.w1, operands.w2)
    with backends.record() as used:
        traced = jax.jit(functools.partial(bench.both, recipe, 16)).trace(operands, state)
        traced.lower(lowering_platforms=("cuda",))
    assert len(used) == (6 if name == "experts24" else 3) and set().union(*used.values()) == {"hopper"}


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_loads_are_as_even_as_is_asked_for(bench, skew):
    chosen = bench.random_operands(**SHAPE | dict(experts=16), skew=skew).chosen
    assert all(len(set(row)) == 2 for row in chosen.tolist())
    loads = bench.loads(chosen, 16)
    if skew:
        assert loads["busiest"] > 2 and loads["idlest"] < 0.5
    else:
        assert 1 < loads["busiest"] < 1.5 and 0.6 < loads["idlest"] < 1
