"""Benchmarks of one layer without a GPU: recipes have outputs and gradients, and experts the loads asked for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import app

from experiments.bench import experts, ffn, layers
from sparse_lm.ops import backends

TOKENS, DIM, NEURONS = 512, 64, 512


@pytest.mark.parametrize("name", ["act24", "venom 128:2:16"])
def test_recipes_are_traced(name):
    """Others that have kernels are lowered for Hopper below."""
    recipe = ffn.recipes_of("squared_relu", [name])[name]
    layer = ffn.lower_ffn(recipe, ffn.random_operands(TOKENS, DIM, NEURONS, jnp.float32))
    assert bool(layer.reference_ops) == bool(recipe.products)
    shapes = [leaf.shape for leaf in layer.both.out_info]
    assert shapes == [(TOKENS, DIM), (TOKENS, DIM), (NEURONS, DIM), (NEURONS, DIM)]


def test_a_gate_is_computed_by_the_recipes_that_can():
    recipes = ffn.recipes_of("swiglu")
    assert recipes.keys() == {"dense", "dense fp8", "fst", "sste", "dense slices 1:4"}
    assert ffn.recipes_of("gated_relu2").keys() == recipes.keys() | {"slices 2:16"}
    with pytest.raises(app.UsageError, match=r"'venom 128:2:16'\] must be among .* --activation=swiglu"):
        ffn.recipes_of("swiglu", ["venom 128:2:16"])


@pytest.mark.long
@pytest.mark.parametrize("name, activation", [("slices 2:16", "gated_relu2"), ("fst", "swiglu"), ("experts24", None)])
def test_hopper_runs_all_of_a_layer(name, activation, monkeypatch):
    """Every sparse operation has a kernel, which lowers on a machine without a GPU."""
    monkeypatch.setattr(backends, "unavailable", lambda name: None if name in ("hopper", "reference") else "absent")
    if activation is None:  # at the benchmark's size
        recipe = experts.RECIPES[name]()
        draw = functools.partial(experts.random_operands, 8192, **experts.SHAPE, skew=0.0)
        function = functools.partial(experts.experts_of, recipe, experts.SHAPE["experts"])
    else:
        recipe = ffn.recipes_of(activation)[name]
        draw = functools.partial(ffn.random_operands, 4096, 256, 2048, activation=activation)
        function = functools.partial(ffn.ffn, recipe)
    operands = jax.eval_shape(draw)
    state = jax.eval_shape(recipe.init_state, operands.w1, operands.w2)
    with backends.record() as used:
        traced = jax.jit(functools.partial(layers.both, function)).trace(operands, state)
        traced.lower(lowering_platforms=("cuda",))
    assert len(used) >= (6 if name == "experts24" else 3) and set().union(*used.values()) == {"hopper"}, used


def test_the_busiest_expert_has_the_load_that_is_asked_for():
    imbalance = 1.76
    operands = ffn.random_operands(4096, DIM, NEURONS, jnp.float32)
    recipe = ffn.RECIPES["slices 2:16"]
    operands, state = ffn.sparse_phase(recipe, operands, imbalance)
    _, stats = jax.jit(recipe.ffn)(operands.x, operands.w1, operands.w2, state)
    others = (1 - imbalance / 4) / 3
    np.testing.assert_allclose(stats["expert_load"], [imbalance / 4, others, others, others], atol=0.03)


def test_loads_of_a_mixture_are_as_even_as_is_asked_for():
    draw = functools.partial(experts.random_operands, 512, dim=64, experts=16, expert_dim=64, choices=2)
    even, uneven = (draw(skew=skew).chosen for skew in (0, 1))
    assert all(len(set(row)) == 2 for row in uneven.tolist())
    even, uneven = experts.loads(even, 16), experts.loads(uneven, 16)
    assert 1 < even["busiest"] < 1.5 and 0.6 < even["idlest"] < 1
    assert uneven["busiest"] > 2 and uneven["idlest"] < 0.5
