"""The FFN benchmark at a size for CPUs: every recipe has outputs and gradients, and experts the loads asked for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import backends

TOKENS, DIM, NEURONS = 512, 64, 512


@pytest.fixture
def bench(script):
    return script("experiments.bench.ffn")


@pytest.mark.parametrize("name", ["dense", "act24", "act24 fp8", "fst", "sste", "venom 128:2:8", "slices 2:8"])
def test_every_recipe_is_traced(bench, name):
    recipe = bench.recipes_of("squared_relu", [name])[name]
    ffn = bench.lower(recipe, bench.random_operands(TOKENS, DIM, NEURONS, jnp.float32))
    assert bool(ffn.reference_ops) == bool(recipe.products)
    assert [leaf.shape for leaf in ffn.both.out_info] == [(TOKENS, DIM), (TOKENS, DIM), (NEURONS, DIM), (NEURONS, DIM)]


@pytest.mark.long
@pytest.mark.parametrize(
    "activation, names",
    [
        ("swiglu", {"dense", "dense fp8", "fst", "sste", "dense slices 1:4"}),
        (
            "gated_relu2",
            {"dense", "dense fp8", "fst", "sste", "dense slices 1:4", "slices 2:8", "slices 2:16"},
        ),
    ],
)
def test_a_gate_is_computed_by_the_recipes_that_can(bench, activation, names):
    recipes = bench.recipes_of(activation)
    assert recipes.keys() == names
    operands = bench.random_operands(TOKENS, DIM, NEURONS, jnp.float32, activation)
    for recipe in recipes.values():
        shapes = [leaf.shape for leaf in bench.lower(recipe, operands).both.out_info]
        assert shapes == [(TOKENS, DIM), (TOKENS, DIM), (2 * NEURONS, DIM), (NEURONS, DIM)]
    with pytest.raises(bench.app.UsageError, match=rf"'venom 128:2:8'\] must be among .* --activation={activation}"):
        bench.recipes_of(activation, ["venom 128:2:8"])


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe, activation", [("slices 2:16", "gated_relu2"), ("fst", "swiglu"), ("act24 fp8", "squared_relu")]
)
def test_hopper_runs_all_of_an_ffn(bench, recipe, activation, monkeypatch):
    """Every sparse operation has a kernel, which lowers on a machine without a GPU."""
    monkeypatch.setattr(backends, "unavailable", lambda name: None if name in ("hopper", "reference") else "absent")
    recipe = bench.recipes_of(activation)[recipe]
    operands = jax.eval_shape(functools.partial(bench.random_operands, 4096, 256, 2048, activation=activation))
    state = jax.eval_shape(recipe.init_state, operands.w1, operands.w2)
    with backends.record() as used:
        jax.jit(functools.partial(bench.both, recipe)).trace(operands, state).lower(lowering_platforms=("cuda",))
    assert len(used) >= 3 and set().union(*used.values()) == {"hopper"}, used


@pytest.mark.parametrize("imbalance", [1.0, 1.76])
def test_the_busiest_expert_has_the_load_that_is_asked_for(bench, imbalance):
    operands = bench.random_operands(4096, DIM, NEURONS, jnp.float32)
    recipe = bench.RECIPES["slices 2:16"]
    operands, state = bench.sparse_phase(recipe, operands, imbalance)
    _, stats = jax.jit(recipe.ffn)(operands.x, operands.w1, operands.w2, state)
    others = (1 - imbalance / 4) / 3
    np.testing.assert_allclose(stats["expert_load"], [imbalance / 4, others, others, others], atol=0.03)
