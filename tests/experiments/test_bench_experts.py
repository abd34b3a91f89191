"""The benchmark of experts without a GPU: every operation has a kernel, and loads are as they are said."""

import functools

import jax
import pytest

from sparse_lm.ops import backends

SHAPE = dict(tokens=512, dim=64, experts=4, width=64, choices=2)


@pytest.fixture
def bench(script):
    return script("experiments.bench.experts")


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
