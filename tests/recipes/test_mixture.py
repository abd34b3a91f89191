"""A mixture's experts, dense and sparse, against float64 formulas: outputs and all gradients, whatever the loads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sparse_lm import ops
from sparse_lm.collectives import Axes
from sparse_lm.recipes import DENSE, RECIPES, Experts24, Recipe, Slices
from sparse_lm.recipes.base import Shape
from sparse_lm.recipes.groups import fitting_block, group_by_expert
from tests.recipes import examples
from tests.recipes.numpy_mixture import mixture, slots_by_expert

TOKENS, DIM, EXPERTS, WIDTH, CHOICES = 90, 24, 5, 20, 3
KEY = jax.random.key(1)
SPARSE = Experts24(v=16)
STATE = Experts24.State(jnp.float32(1.4), jnp.float32(1.3))
RECIPES_OF_EXPERTS = {"dense": (DENSE, None), "experts24": (SPARSE, STATE)}


def loads(name):
    """int32[T, k], distinct in a row: any experts, none of expert 2, or expert 1 for all tokens."""
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)
    if name == "an expert without tokens":
        chosen = np.array([row[row != 2] for row in chosen])
    if name == "an expert of all tokens":
        chosen = np.array([[1, *row[row != 1]] for row in chosen])
    return jnp.asarray(chosen[:, :CHOICES], jnp.int32)


LOADS = ["any", "an expert without tokens", "an expert of all tokens"]


@dataclasses.dataclass
class Inputs:
    """Holds random inputs."""

    x: jax.Array
    w1: jax.Array
    w2: jax.Array
    gates: jax.Array
    do: jax.Array
    order: jax.Array

    @property
    def differentiated(self):
        return self.x, self.w1, self.w2, self.gates


INPUTS = Inputs(
    x=examples.random(0, TOKENS, DIM),
    w1=examples.random(1, EXPERTS * WIDTH, DIM) / 4,
    w2=examples.random(2, EXPERTS * WIDTH, DIM) / 8,
    gates=jnp.abs(examples.random(5, TOKENS, CHOICES)),
    do=examples.random(3, TOKENS, DIM),
    order=examples.ORDER[examples.ORDER < TOKENS],
)


@functools.cache
def outputs_and_gradients(recipe):
    """A compiled function: (O, dX, dW1, dW2, dgates, statistics)."""

    @jax.jit
    def run(x, w1, w2, gates, do, chosen, state, key, order):
        experts = EXPERTS if w1.shape[0] == EXPERTS * WIDTH else w1.shape[0] // 256
        groups = group_by_expert(chosen, experts, recipe.block_of_experts(chosen.size, experts), order)
        f = lambda *args: recipe.mixture(*args, groups, state, key=key)  # noqa: E731
        o, vjp, stats = jax.vjp(f, x, w1, w2, gates, has_aux=True)
        return o, *vjp(do), stats

    return run


def run(name, load, inputs=INPUTS, key=KEY):
    recipe, state = RECIPES_OF_EXPERTS[name]
    return outputs_and_gradients(recipe)(*inputs.differentiated, inputs.do, loads(load), state, key, inputs.order)


def expected(name, load, draw=None):
    x, w1, w2, gates, do = (np.asarray(a, np.float64) for a in (*INPUTS.differentiated, INPUTS.do))
    recipe, state = RECIPES_OF_EXPERTS[name]
    options = {} if state is None else dict(scales=(float(state.scale_up), float(state.scale_down)), draw=draw)
    v = recipe.block_of_experts(TOKENS * CHOICES, EXPERTS)
    shape = EXPERTS, WIDTH, DIM
    chosen, order = np.asarray(loads(load)), np.asarray(INPUTS.order)
    return mixture(x, w1.reshape(shape), w2.reshape(shape), gates, chosen, do, order=order, v=v, **options)


@jax.jit
def _draw(a, key):
    return ops.sparsify_24(a, "mvue", 0, key=key).to_dense().T


def draw(a, use):
    return np.asarray(_draw(jnp.asarray(a, jnp.float32), jax.random.fold_in(KEY, use)), np.float64)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", RECIPES_OF_EXPERTS)
def test_formulas(name, load):
    o, dx, dw1, dw2, dgates, stats = run(name, load)
    result, expected_dgates = expected(name, load, draw)
    for found, wanted in zip(
        (o, dx, dw1, dw2, dgates), (result.o, result.dx, result.dw1, result.dw2, expected_dgates), strict=True
    ):
        assert np.linalg.norm(np.asarray(found, np.float64) - wanted) < 1e-5 * np.linalg.norm(wanted)
    for stat, value in result.stats.items():
        np.testing.assert_allclose(stats[stat], value, rtol=1e-5, atol=1e-6, err_msg=stat)
    if load == "an expert without tokens":
        for dw in (dw1, dw2):
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


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", RECIPES_OF_EXPERTS)
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
    found, stats = jax.jit(on_mesh)(*INPUTS.differentiated, INPUTS.do, loads(load))
    *wanted, wanted_stats = run(name, load)
    for number, (mine, alone) in enumerate(zip(found, wanted, strict=True)):
        drawn = recipe.stochastic and number in (2, 3)
        assert mine.shape == alone.shape
        assert float(jnp.linalg.norm(mine - alone)) < (0.7 if drawn else 1e-5) * float(jnp.linalg.norm(alone))
    for key, value in wanted_stats.items():
        np.testing.assert_allclose(stats[key], value, rtol=1e-5, err_msg=key)


def test_dense_experts_are_automatic_differentiation():
    chosen = loads("any")

    def masked(x, w1, w2, gates):
        """Every expert computes every token."""
        w1, w2 = (w.reshape(EXPERTS, WIDTH, DIM) for w in (w1, w2))
        each = jnp.einsum("etf,efd->etd", jnp.square(jax.nn.relu(jnp.einsum("td,efd->etf", x, w1))), w2)
        share = jnp.sum(gates[:, :, None] * (chosen[:, :, None] == jnp.arange(EXPERTS)), axis=1)
        return jnp.einsum("te,etd->td", share, each)

    o, vjp = jax.vjp(masked, *INPUTS.differentiated)
    for mine, theirs in zip(run("dense", "any"), (o, *vjp(INPUTS.do)), strict=False):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.long
def test_stochastic_gradients_are_unbiased():
    """The mean over many draws is the gradient without a draw, within the mean's own spread."""
    gradients = lambda key: run("experts24", "any", key=key)[2:4]  # noqa: E731
    draws = jax.jit(lambda keys: jax.lax.map(gradients, keys, batch_size=50))(jax.random.split(KEY, 1200))
    result, _ = expected("experts24", "any")
    for samples, mean in zip(draws, (result.dw1, result.dw2), strict=True):
        samples = np.asarray(samples, np.float64)
        random = samples.std(0) > 1e-3
        z = (samples.mean(0) - mean)[random] / (samples.std(0)[random] / np.sqrt(len(samples)))
        np.testing.assert_allclose(samples.mean(0)[~random], mean[~random], atol=5e-3)
        assert random.mean() > 0.5
        assert abs(np.mean(z)) < 15 / np.sqrt(z.size)
        assert 0.8 < np.std(z) < 1.2


@pytest.mark.parametrize("name", RECIPES_OF_EXPERTS)
def test_layers_of_prepared_weights_are_found(name):
    recipe, state = RECIPES_OF_EXPERTS[name]
    w1, w2 = (jnp.stack([-2 * w, w, 3 * w]) for w in (INPUTS.w1, INPUTS.w2))
    states = jax.tree.map(lambda a: jnp.stack([2 * a, a, -a]), state or recipe.State())
    chosen = loads("any")

    @jax.jit
    def among_all(x, w1, w2, gates):
        groups = group_by_expert(chosen, EXPERTS, recipe.block_of_experts(chosen.size, EXPERTS), INPUTS.order)
        weights = recipe.prepare(w1, w2, states, x.dtype)
        f = lambda x, w1, w2, gates: recipe.mixture(  # noqa: E731
            x, w1, w2, gates, groups, state, key=KEY, weights=weights, layer=1
        )
        o, vjp, _ = jax.vjp(f, x, w1[1], w2[1], gates, has_aux=True)
        return o, *vjp(INPUTS.do)

    for own, found in zip(run(name, "any"), among_all(INPUTS.x, w1, w2, INPUTS.gates), strict=False):
        np.testing.assert_array_equal(own, found)


@pytest.mark.parametrize("name", RECIPES_OF_EXPERTS)
def test_in_bfloat16_only_rounding_is_lost(name):
    rounded = [a.astype(jnp.bfloat16).astype(jnp.float32) for a in (INPUTS.x, INPUTS.do)]
    high = run(name, "any", dataclasses.replace(INPUTS, x=rounded[0], do=rounded[1]))
    low = run(
        name,
        "any",
        dataclasses.replace(INPUTS, **dict(zip(("x", "do"), (a.astype(jnp.bfloat16) for a in rounded), strict=True))),
    )
    for a, b in zip(low[:5], high[:5], strict=True):
        error = jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)
        assert float(error) < (0.1 if name == "experts24" else 0.02)
    assert [a.dtype for a in low[:5]] == [jnp.bfloat16] * 2 + [jnp.float32] * 3


@pytest.mark.parametrize("v", [1, 4, 16, 64])
@pytest.mark.parametrize("load", LOADS)
def test_pairs_are_grouped_by_expert(load, v):
    chosen = loads(load)
    groups = group_by_expert(chosen, EXPERTS, v, INPUTS.order)
    tokens, owners = slots_by_expert(np.asarray(chosen), np.asarray(INPUTS.order), EXPERTS, v)
    found = np.asarray(groups.rows.slots) // CHOICES
    np.testing.assert_array_equal(np.where(found < TOKENS, found, -1), tokens)
    np.testing.assert_array_equal(np.repeat(groups.block_experts, v), owners)
    np.testing.assert_array_equal(groups.blocks_with_pairs(), (tokens.reshape(-1, v) >= 0).any(1))
    np.testing.assert_array_equal(groups.rows.slots[groups.rows.position], np.arange(chosen.size))


def test_dispatch_and_combine_are_each_others_transposes():
    """`dispatch` and `gate_gradients` compute the gradient of `combine`."""
    groups = group_by_expert(loads("any"), EXPERTS, 16, INPUTS.order)
    pairs, gates = examples.random(6, TOKENS * CHOICES, DIM), INPUTS.gates
    o, vjp = jax.vjp(groups.combine, pairs, gates)
    np.testing.assert_allclose(
        o, jnp.sum(gates[..., None] * pairs.reshape(TOKENS, CHOICES, DIM), 1), rtol=1e-5, atol=1e-6
    )
    dpairs, dgates = vjp(INPUTS.do)
    slots = groups.dispatch(INPUTS.do, gates)
    np.testing.assert_allclose(slots[groups.rows.position], dpairs, rtol=1e-6, atol=1e-6)
    padded = np.setdiff1d(np.arange(len(slots)), groups.rows.position)
    assert len(padded) and not slots[padded].any()
    o_do = jnp.zeros(len(slots)).at[groups.rows.position].set(jnp.sum(pairs * dpairs, axis=1))  # of a linear expert
    np.testing.assert_allclose(groups.gate_gradients(o_do, gates), dgates, rtol=1e-5, atol=1e-5)
    assert not groups.gate_gradients(o_do, jnp.zeros_like(gates)).any()
    _, vjp = jax.vjp(groups.dispatch, INPUTS.x)
    in_slots = examples.random(7, *slots.shape)
    np.testing.assert_allclose(groups.combine(in_slots[groups.rows.position]), vjp(in_slots)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "most, pairs, experts, v", [(128, 10**6, 4, 128), (96, 10**6, 4, 96), (128, 70, 4, 16), (128, 2, 8, 1)]
)
def test_blocks_are_no_larger_than_an_even_load(most, pairs, experts, v):
    assert fitting_block(most, pairs, experts) == v


# What recipes say of themselves, and refuse.


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_computes_experts_if_it_says_so(name):
    recipe = RECIPES[name]
    assert ("experts" in recipe.computes) == (recipe.forward_experts is not Recipe.forward_experts)
    assert ("experts" in recipe.computes) == (recipe.backward_experts is not Recipe.backward_experts)
    assert ("squared_relu" in recipe.computes) == (recipe.forward is not Recipe.forward)


@pytest.mark.long
def test_what_a_recipe_does_not_compute_is_refused():
    chosen = loads("any")
    groups = group_by_expert(chosen, EXPERTS, 16)
    with pytest.raises(ValueError, match="recipe 'slices' computes squared_relu, gated_relu2, not experts"):
        Slices().mixture(*INPUTS.differentiated, groups)
    with pytest.raises(ValueError, match="recipe 'experts24' computes experts, not squared_relu"):
        SPARSE.ffn(INPUTS.x, INPUTS.w1, INPUTS.w2, STATE)
    for axes in (Axes(tensor="tensor"), Axes(batch=("expert",), expert="expert")):
        with pytest.raises(ValueError, match=f"along None are not split along the mesh's axis '{axes.all[-1]}'"):
            SPARSE.mixture(*INPUTS.differentiated, groups, STATE, axes=axes)
    with pytest.raises(ValueError, match="recipe 'experts24' reads a state"):
        SPARSE.mixture(*INPUTS.differentiated, groups)
    with pytest.raises(ValueError, match="stochastic: ffn needs a key"):
        jax.grad(lambda x: SPARSE.mixture(x, *INPUTS.differentiated[1:], groups, STATE)[0].sum())(INPUTS.x)


def test_rules_name_the_block_that_no_format_has():
    shape = Shape(DIM, WIDTH, TOKENS)
    assert [name for name, _, ok, _ in Experts24(v=48).rules(shape) if not ok] == ["v"]
    assert all(ok for _, _, ok, _ in SPARSE.rules(shape))


def test_leaving_keeps_the_function_of_experts_whose_activations_lose_nothing():
    """Every second neuron is the one before with its sign changed: of four, at most two are active."""
    w1 = jnp.where((jnp.arange(EXPERTS * WIDTH) % 2)[:, None], -jnp.roll(INPUTS.w1, 1, axis=0), INPUTS.w1)
    state, order = SPARSE.enter(w1, INPUTS.w2)
    assert order is None
    chosen = loads("any")
    groups = group_by_expert(chosen, EXPERTS, 16)
    sparse, _ = SPARSE.mixture(INPUTS.x, w1, INPUTS.w2, INPUTS.gates, groups, state)
    left = SPARSE.leave(w1, INPUTS.w2, state)
    dense, _ = DENSE.mixture(INPUTS.x, *left, INPUTS.gates, groups)
    np.testing.assert_allclose(dense, sparse, rtol=1e-4, atol=1e-4)
    before, _ = DENSE.mixture(INPUTS.x, w1, INPUTS.w2, INPUTS.gates, groups)
    assert np.abs(before - sparse).max() > 0.1
    again = SPARSE.leave(*left, SPARSE.refit(*left, state))
    jax.tree.map(np.testing.assert_array_equal, left, again)


@pytest.mark.gpu
@pytest.mark.parametrize("load", ["even", "uneven"])
@pytest.mark.parametrize("name", RECIPES_OF_EXPERTS)
def test_best_implementation_is_as_accurate_as_the_reference(name, load):
    """Whichever kernels run in bf16 on a GPU err at most 1.5 times as much as the reference, against float32."""
    tokens, dim, experts, width, choices = 1000, 256, 4, 256, 2
    x, w1, w2, do = (
        (examples.random(seed, *shape) * scale).astype(jnp.bfloat16).astype(jnp.float32)
        for seed, (shape, scale) in enumerate(
            (((tokens, dim), 1), ((experts * width, dim), 0.1), ((experts * width, dim), 0.05), ((tokens, dim), 1))
        )
    )
    rng = np.random.default_rng(8)
    score = rng.random((tokens, experts)) + (np.array([1.0, 0.3, 0.0, -9.0]) if load == "uneven" else 0)
    chosen = jnp.asarray(np.argsort(-score, axis=1)[:, :choices], jnp.int32)  # uneven: none for the last expert
    gates = jnp.asarray(rng.random((tokens, choices)), jnp.float32)
    recipe = Experts24() if name == "experts24" else DENSE
    state = jax.jit(recipe.enter)(w1, w2)[0]

    def compute(dtype, implementation):
        function = outputs_and_gradients(dataclasses.replace(recipe, implementation=implementation))
        with jax.default_matmul_precision("highest"):
            results = function(x.astype(dtype), w1, w2, gates, do.astype(dtype), chosen, state, KEY, None)
        return [np.asarray(a, np.float64) for a in results[:5]]

    exact = compute(jnp.float32, "reference")
    errors = [
        [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(compute(jnp.bfloat16, which), exact, strict=True)]
        for which in (None, "reference")
    ]
    for best, reference in zip(*errors, strict=True):
        assert best <= 1.5 * reference, errors
