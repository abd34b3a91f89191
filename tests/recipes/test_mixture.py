"""A mixture's experts, dense and sparse, against float64 formulas: outputs and all gradients, whatever the loads."""

import dataclasses
import functools
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sparse_lm.collectives import Axes
from sparse_lm.recipes import DENSE, Experts24
from sparse_lm.recipes.groups import group_by_expert
from tests.ops.operands import relative_error
from tests.recipes import examples
from tests.recipes import masked_dense_ffn as dense64
from tests.recipes.examples import KEY

TOKENS, DIM, EXPERTS, WIDTH, CHOICES = 90, 24, 5, 20, 3
SPARSE = Experts24(v=16)
STATE = Experts24.State(jnp.float32(1.4), jnp.float32(1.3))
GATED = dataclasses.replace(DENSE, activation="swiglu")
RECIPES_OF_EXPERTS = {
    "dense": (DENSE, None),
    "dense, swiglu": (GATED, None),
    "experts24": (SPARSE, STATE),
    "experts24, gated_relu2": (dataclasses.replace(SPARSE, activation="gated_relu2"), STATE),
}


def loads(name):
    """int32[T, k], distinct in a row: any experts, none of expert 2, or expert 1 for all tokens."""
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)
    if name == "an expert without tokens":
        chosen = np.array([row[row != 2] for row in chosen])
    if name == "an expert of all tokens":
        chosen = np.array([[1, *row[row != 1]] for row in chosen])
    return jnp.asarray(chosen[:, :CHOICES], jnp.int32)


Inputs = namedtuple("Inputs", ["x", "w1", "w2", "gates", "do", "order"])
"""Random inputs, those first that are differentiated."""


INPUTS = Inputs(
    x=examples.random(0, TOKENS, DIM),
    w1=examples.random(1, EXPERTS * WIDTH, DIM) / 4,
    w2=examples.random(2, EXPERTS * WIDTH, DIM) / 8,
    gates=examples.random(5, TOKENS, CHOICES),
    do=examples.random(3, TOKENS, DIM),
    order=examples.ORDER[examples.ORDER < TOKENS],
)


@functools.cache
def outputs_and_gradients(recipe):
    """A compiled function: (O, dX, dW1, dW2, dgates, statistics)."""

    @functools.partial(jax.jit, static_argnames="experts")
    def run(x, w1, w2, gates, do, chosen, state, key, order, experts=EXPERTS, **prepared):
        groups = group_by_expert(chosen, experts, recipe.block_of_experts(chosen.size, experts), order)
        f = lambda *args: recipe.mixture(*args, groups, state, key=key, **prepared)  # noqa: E731
        o, vjp, stats = jax.vjp(f, x, w1, w2, gates, has_aux=True)
        return o, *vjp(do), stats

    return run


def run(name, load, inputs=INPUTS, **prepared):
    recipe, state = RECIPES_OF_EXPERTS[name]
    inputs = inputs._replace(w1=w1_of(recipe, inputs.w1))
    return outputs_and_gradients(recipe)(*inputs[:4], inputs.do, loads(load), state, KEY, inputs.order, **prepared)


def w1_of(recipe, w1):
    """W1 with the rows that a recipe's activation has: with a gate two a neuron."""
    return jnp.concatenate([w1, w1[::-1]]) if recipe.activation != "squared_relu" else w1


def expected(name, load, draw=None):
    recipe, state = RECIPES_OF_EXPERTS[name]
    inputs = INPUTS._replace(w1=w1_of(recipe, INPUTS.w1))
    x, w1, w2, gates, do = (np.asarray(a, np.float64) for a in (*inputs[:4], inputs.do))
    options = {} if state is None else dict(scales=(float(state.scale_up), float(state.scale_down)), draw=draw)
    v = recipe.block_of_experts(TOKENS * CHOICES, EXPERTS)
    given = dense64.Inputs(x, w1, w2, do, np.asarray(INPUTS.order), recipe.activation)
    return dense64.mixture(given, gates=gates, chosen=np.asarray(loads(load)), experts=EXPERTS, v=v, **options)


@pytest.mark.parametrize("load", ["any", "an expert without tokens", "an expert of all tokens"])
@pytest.mark.parametrize("name", RECIPES_OF_EXPERTS)
def test_formulas(name, load):
    *found, stats = run(name, load)
    result, dgates = expected(name, load, examples.draw)
    for a, b in zip(found, (result.o, result.dx, result.dw1, result.dw2, dgates), strict=True):
        assert relative_error(a, b) < 1e-5
    for stat, value in result.stats.items():
        np.testing.assert_allclose(stats[stat], value, rtol=1e-5, atol=1e-6, err_msg=stat)
    if load == "an expert without tokens":
        for dw in found[2:4]:
            assert not dw.reshape(EXPERTS, -1)[2].any() and dw.reshape(EXPERTS, -1)[1].any()


def storing_as_kernels(recipe):
    """A recipe whose products store nothing for pairs of other devices' experts."""

    def stored(of_pairs, groups):
        return jnp.where((groups.rows.position < groups.rows.slots.size)[:, None], of_pairs, jnp.nan)

    class Storing(type(recipe)):
        def forward_experts(self, x, ffn):
            o, *rest = super().forward_experts(x, ffn)
            return stored(o, ffn.groups), *rest

        def backward_experts(self, x, saved, do, ffn):
            dx, *rest = super().backward_experts(x, saved, do, ffn)
            return stored(dx, ffn.groups), *rest

    return Storing(**{field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)})


@pytest.mark.parametrize(
    "name, load", [("dense, swiglu", "an expert without tokens"), ("experts24, gated_relu2", "an expert of all tokens")]
)
def test_experts_on_devices_of_their_own_compute_the_tokens_of_all(name, load):
    """Each of five devices has an expert and 18 tokens; but for what is stochastic, the result is that of one."""
    recipe, state = RECIPES_OF_EXPERTS[name]
    axes = Axes(batch=("expert",), expert="expert")

    def local(x, w1, w2, gates, do, chosen):
        chosen = jax.lax.all_gather(chosen, "expert", tiled=True)
        v = recipe.block_of_experts(chosen.size, EXPERTS)
        groups = group_by_expert(chosen, EXPERTS, v, INPUTS.order, "expert")
        f = lambda *args: storing_as_kernels(recipe).mixture(*args, groups, state, key=KEY, axes=axes)  # noqa: E731
        o, vjp, stats = jax.vjp(f, x, w1, w2, gates, has_aux=True)
        return (o, *vjp(do)), stats

    mesh, split = Mesh(np.array(jax.devices()[:EXPERTS]), ("expert",)), P("expert")
    on_mesh = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=(split, P()), check_vma=False)
    inputs = INPUTS._replace(w1=w1_of(recipe, INPUTS.w1))
    found, stats = jax.jit(on_mesh)(*inputs[:4], inputs.do, loads(load))
    *wanted, wanted_stats = run(name, load)
    for number, (mine, alone) in enumerate(zip(found, wanted, strict=True)):
        drawn = recipe.stochastic and number in (2, 3)
        assert mine.shape == alone.shape
        assert relative_error(mine, alone) < (0.7 if drawn else 1e-5)
    for key, value in wanted_stats.items():
        np.testing.assert_allclose(stats[key], value, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", RECIPES_OF_EXPERTS)
def test_layers_of_prepared_weights_are_found(name):
    recipe, state = RECIPES_OF_EXPERTS[name]
    prepared = examples.among_layers(recipe, w1_of(recipe, INPUTS.w1), INPUTS.w2, state or recipe.State())
    jax.tree.map(np.testing.assert_array_equal, run(name, "any"), run(name, "any", **prepared))


@pytest.mark.parametrize("name", RECIPES_OF_EXPERTS)
def test_in_bfloat16_only_rounding_is_lost(name):
    low = INPUTS._replace(x=INPUTS.x.astype(jnp.bfloat16), do=INPUTS.do.astype(jnp.bfloat16))
    high = low._replace(x=low.x.astype(jnp.float32), do=low.do.astype(jnp.float32))
    low, high = (run(name, "any", inputs) for inputs in (low, high))
    for a, b in zip(low[:5], high[:5], strict=True):
        assert relative_error(a, b) < (0.1 if name.startswith("experts24") else 0.02)
    assert [a.dtype for a in low[:5]] == [jnp.bfloat16] * 2 + [jnp.float32] * 3
    narrow = {field: getattr(INPUTS, field).astype(jnp.bfloat16) for field in ("w2", "gates")}
    mixed = jax.eval_shape(functools.partial(run, name, "any"), INPUTS._replace(**narrow))
    assert [a.dtype for a in mixed[2:5]] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]


def test_a_gate_of_zero_gets_no_gradient():
    *_, dgates, _ = run("dense", "any", INPUTS._replace(gates=INPUTS.gates.at[::3].set(0)))
    np.testing.assert_array_equal((dgates == 0).all(1), np.arange(TOKENS) % 3 == 0)


def test_leaving_keeps_the_function_of_experts_whose_activations_lose_nothing():
    """Every second neuron is the one before with its sign changed: of four, at most two are active."""
    w1 = jnp.where((jnp.arange(EXPERTS * WIDTH) % 2)[:, None], -jnp.roll(INPUTS.w1, 1, axis=0), INPUTS.w1)
    state, order = jax.jit(SPARSE.enter)(w1, INPUTS.w2)
    assert order is None

    @functools.partial(jax.jit, static_argnums=0)
    def output(recipe, w1, w2):
        groups = group_by_expert(loads("any"), EXPERTS, 16)
        return recipe.mixture(INPUTS.x, w1, w2, INPUTS.gates, groups, state)[0]

    leave = jax.jit(SPARSE.leave)
    left = leave(w1, INPUTS.w2, state)
    sparse = output(SPARSE, w1, INPUTS.w2)
    np.testing.assert_allclose(output(DENSE, *left), sparse, rtol=1e-4, atol=1e-4)
    assert np.abs(output(DENSE, w1, INPUTS.w2) - sparse).max() > 0.1
    jax.tree.map(np.testing.assert_array_equal, left, leave(*left, jax.jit(SPARSE.refit)(*left, state)))


def test_arrays_of_numpy_outside_of_jit():
    arrays = *INPUTS[:4], group_by_expert(loads("any"), EXPERTS, DENSE.block_of_experts(TOKENS * CHOICES, EXPERTS))
    found, _ = DENSE.mixture(*jax.tree.map(np.asarray, arrays))
    assert relative_error(found, jax.jit(DENSE.mixture)(*arrays)[0]) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("load", ["even", "uneven"])
@pytest.mark.parametrize("name", RECIPES_OF_EXPERTS)
def test_best_implementation_is_as_accurate_as_the_reference(name, load):
    tokens, dim, experts, width, choices = 1000, 256, 4, 256, 2
    neurons = experts * width
    x, w1, w2, do = examples.random_bf16((1, tokens, dim), (0.1, neurons, dim), (0.05, neurons, dim), (1, tokens, dim))
    rng = np.random.default_rng(8)
    score = rng.random((tokens, experts)) + (np.array([1.0, 0.3, 0.0, -9.0]) if load == "uneven" else 0)
    chosen = jnp.asarray(np.argsort(-score, axis=1)[:, :choices], jnp.int32)  # uneven: none for the last expert
    gates = jnp.asarray(rng.random((tokens, choices)), jnp.float32)
    recipe = RECIPES_OF_EXPERTS[name][0]
    recipe = Experts24(activation=recipe.activation) if recipe.products else recipe
    w1 = w1_of(recipe, w1)
    state = jax.jit(recipe.enter)(w1, w2)[0]

    def run(recipe, dtype):
        function = outputs_and_gradients(recipe)
        return function(x.astype(dtype), w1, w2, gates, do.astype(dtype), chosen, state, KEY, None, experts)[:5]

    examples.assert_best_is_as_accurate_as_the_reference(recipe, run)
