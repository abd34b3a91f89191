"""Entering, refreshing and leaving the sparse phase, on the arrays of one FFN."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops.activations import activate, rows_per_neuron
from sparse_lm.recipes import Dense, DenseSlices, Recipe, Slices, routing
from sparse_lm.recipes.routing import sort_neurons
from tests.ops.numpy_sparse import soft_threshold
from tests.recipes import examples
from tests.recipes import masked_dense_ffn as dense64
from tests.recipes.examples import DIM, GATED, INPUTS, NEURONS, W1, W2, X
from tests.recipes.examples import OF_FFNS as RECIPES
from tests.recipes.numpy_routing import clusters, means, nearest

SCALED = {"sste": 0, "venom": 1, "slices": 1}
"""Recipes whose weights are 2:4 by soft threshold, and the axis of W2's groups."""
CHANGING = [name for name, recipe in RECIPES.items() if recipe.leave is not Recipe.leave]
"""Recipes that leave other weights than they were given."""


@functools.cache
def enter(recipe):
    return jax.jit(recipe.enter)


@functools.cache
def entered(name):
    return enter(examples.RECIPES[name])(W1, W2, X)


def groups_of_four(w, axis):
    return np.moveaxis(np.asarray(w), axis, -1).reshape(-1, 4)


@pytest.mark.parametrize(
    "recipe",
    [
        Slices(m=16, v=16),
        Slices(m=16, v=16, shards=2),
        Slices(m=16, v=16, activation="gated_relu2"),
        DenseSlices(m=16, v=16, shards=2, activation="swiglu"),
    ],
)
def test_slices_hold_the_neurons_that_their_tokens_use_most(recipe):
    """Centroids are k-means of the tokens; a neuron's activation is that of the weights as they are multiplied."""
    w1 = examples.w1_of(recipe)
    state, order = enter(recipe)(w1, W2, X.reshape(4, -1, DIM))
    np.testing.assert_array_equal(np.sort(order), np.arange(NEURONS))
    centroids = clusters(INPUTS.x, 4)
    np.testing.assert_allclose(state.centroids, centroids, atol=1e-5)
    w1 = np.asarray(w1, np.float64)
    w1 = soft_threshold(w1, axis=1) if recipe.sparse_weights else w1
    energy = np.square(dense64.activate(INPUTS.x @ w1.T, recipe.activation)[0])
    experts = nearest(INPUTS.x, centroids)
    by_expert = np.stack([energy[experts == e].sum(0) for e in range(4)])
    owner = np.empty(NEURONS, int)
    owner[np.asarray(order)] = np.tile(np.repeat(np.arange(4), NEURONS // 4 // recipe.shards), recipe.shards)
    own = by_expert[owner, np.arange(NEURONS)]
    least = np.array([own[owner == e].min() for e in range(4)])
    assert not ((by_expert > own * (1 + 1e-4)) & (by_expert > least[:, None] * (1 + 1e-4))).any()
    assert own.sum() / by_expert.sum() > 0.4  # a quarter by chance


@pytest.mark.parametrize("name", SCALED)
def test_scales_are_the_least_squares_fit(name):
    state, _ = entered(name)
    for scale, w, axis in ((state.scale_up, INPUTS.w1, 1), (state.scale_down, INPUTS.w2, SCALED[name])):
        s = soft_threshold(w, axis)
        assert float(scale) == pytest.approx((w * s).sum() / (s * s).sum(), rel=1e-5)


def test_centroids_of_venom_are_among_the_neurons_and_masks_of_fst_transposable():
    centroids = clusters(INPUTS.w1, examples.RECIPES["venom"].experts)
    np.testing.assert_allclose(entered("venom")[0].centroids, centroids, atol=1e-5)
    state, _ = entered("fst")
    for mask, w in ((state.mask_up, W1), (state.mask_down, W2)):
        np.testing.assert_array_equal(mask, jax.jit(ops.transposable_mask)(w))
    assert float(state.decay) == examples.RECIPES["fst"].mask_decay


@pytest.mark.parametrize("name", ["slices", "dense_slices"])
def test_a_refresh_moves_centroids_to_their_tokens(name):
    state = examples.state_of(examples.RECIPES[name])
    new, _ = jax.jit(examples.RECIPES[name].refresh)(W1, W2, state, X)
    expected = means(INPUTS.x, np.asarray(state.centroids))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), new, state._replace(centroids=expected))


def test_a_refresh_of_masks_is_of_the_weights_as_they_are_and_counts_flips():
    recipe = examples.RECIPES["fst"]
    refresh = jax.jit(recipe.refresh)
    state, _ = entered("fst")
    _, metrics = refresh(W1, W2, state)
    assert metrics["flip_rate"] == 0  # the weights have not moved
    w1 = W1 + 0.1 * examples.random(9, *W1.shape)
    new, metrics = refresh(w1, W2, state)
    jax.tree.map(np.testing.assert_array_equal, new, enter(recipe)(w1, W2)[0])
    assert float(metrics["flip_rate"]) == pytest.approx(np.mean(state.mask_up != new.mask_up) / 2) != 0


def paired(w1, rows):
    """Weights in which each second neuron's first row is its neighbour's with its sign changed.

    Of four neurons, at most two are then active by a squared ReLU.
    """
    by_neuron = w1.reshape(NEURONS, rows, -1)
    return by_neuron.at[1::2, 0].set(-by_neuron[::2, 0]).reshape(w1.shape)


@pytest.mark.parametrize("case", [*CHANGING, "fst, swiglu", "sste, geglu", "slices, gated_relu2"])
def test_leaving_keeps_the_function_that_the_sparse_weights_computed(case):
    """Dense products of the weights that are left give the sparse output where activations lose nothing to 2:4."""
    recipe = (examples.RECIPES | GATED)[case]
    if recipe.name in ("venom", "slices"):
        recipe = dataclasses.replace(recipe, m=4)  # no neuron is left out but by 2:4
    w1 = paired(examples.w1_of(recipe), rows_per_neuron(recipe.activation))
    state, order = enter(recipe)(w1, W2, X)
    assert order is None or (order == np.arange(NEURONS)).all()
    recipe, dense = recipe.for_evaluation(), examples.output(Dense(activation=recipe.activation))
    left = jax.jit(recipe.leave)(w1, W2, state)
    sparse = examples.output(recipe)(X, w1, W2, state)
    np.testing.assert_allclose(dense(X, *left, None), sparse, rtol=1e-4, atol=1e-4)
    assert np.abs(dense(X, w1, W2, None) - sparse).max() > 0.1


@pytest.mark.parametrize("activation", ["squared_relu", "gated_relu2"])
def test_slices_turn_neurons_away_from_tokens_of_other_experts_alone(activation):
    """Neurons give others' tokens less than half of what they gave; to their own they give about what they did."""
    keys = jax.random.split(jax.random.key(0), 5)
    recipe, rows = Slices(v=64, activation=activation), 256 * rows_per_neuron(activation)
    w1, w2 = (jax.random.normal(key, (n, 64)) / 8 for key, n in zip(keys[:2], (rows, 256), strict=True))
    towards = jax.random.randint(keys[2], (1024,), 0, 4)
    x = jax.random.normal(keys[3], (1024, 64)) + 4 * jax.random.normal(keys[4], (4, 64))[towards]
    x = x.at[7].set(jnp.nan)  # counts for nothing
    state, order = jax.jit(recipe.enter)(w1, w2, x)
    w1, w2 = sort_neurons(w1, order), w2[order]
    own = np.delete(routing.assign_tokens(x, state.centroids), 7)[:, None] == np.arange(4)

    def hidden(*batch):
        """Returns Y [T, E, S] with the weights that are left."""
        up, _ = jax.jit(recipe.leave)(w1, w2, state, *batch)
        return np.delete(activate(x @ up.T, activation)[0], 7, axis=0).reshape(-1, 4, 64)

    plain, turned = hidden(), hidden(x)
    kept = np.linalg.norm(turned[~own]) / np.linalg.norm(plain[~own])
    changed = np.linalg.norm(turned[own] - plain[own]) / np.linalg.norm(plain[own])
    assert kept < 0.5 and changed < kept


def test_slices_turn_neurons_away_after_a_phase_that_2_4_weights_have_entered():
    """Whose scale is 1, as if they had been left, for all of a phase in which they are trained."""
    recipe = examples.RECIPES["slices"]
    leave = jax.jit(recipe.leave)
    left = leave(W1, W2, entered("slices")[0])
    (state, _), trained = enter(recipe)(*left, X), left[0] + 0.1 * np.random.default_rng(0).normal(size=W1.shape)
    assert float(state.scale_up) == 1
    assert np.abs(leave(trained, left[1], state, X)[0] - leave(trained, left[1], state)[0]).max() > 0.01


@pytest.mark.parametrize("name", CHANGING)
def test_weights_that_are_left_are_two_of_four_along_what_products_contract(name):
    recipe = examples.RECIPES[name]
    left = dict(zip(("up", "down"), jax.jit(recipe.leave)(W1, W2, entered(name)[0]), strict=True))
    inputs = {"up": 1, "down": 0}  # the axis of [F, D] along which a linear layer's inputs run
    along = [n for n, w in left.items() if (np.count_nonzero(groups_of_four(w, inputs[n]), axis=1) <= 2).all()]
    weights = {"up": "W1 2:4", "down": "W2 2:4"}
    assert along == [n for n, said in weights.items() if recipe.products.get(n, "").startswith(said)]
    if name in ("venom", "slices"):
        assert (np.count_nonzero(groups_of_four(left["down"], 1), axis=1) <= 2).all()


@pytest.mark.parametrize("name", CHANGING)
def test_leaving_again_changes_nothing(name):
    """The state follows from the weights as they are left, or is that of a new sparse phase."""
    recipe = examples.RECIPES[name]
    (state, _), x = entered(name), X if recipe.leave_reads_inputs else None
    leave = jax.jit(lambda *arrays: recipe.leave(*arrays, x))
    once = leave(W1, W2, state)
    refit = jax.jit(recipe.refit)(*once, state)
    jax.tree.map(np.testing.assert_array_equal, once, leave(*once, refit))
    if name in SCALED:
        assert np.abs(leave(*once, state)[0] - once[0]).max() > 0.1  # without the refit they are scaled twice
        assert float(refit.scale_up) == float(refit.scale_down) == 1
        again, _ = enter(recipe)(*once, X)
        assert float(again.scale_up) == float(again.scale_down) == 1


@pytest.mark.parametrize("name", RECIPES)
def test_weights_and_gradients_stay_in_their_dtype(name):
    """A state's numbers, in float32, turn no bfloat16 into float32, of which a training step would compile anew."""
    recipe, w1, w2 = examples.RECIPES[name], W1.astype(jnp.bfloat16), W2.astype(jnp.bfloat16)
    state, _ = entered(name)
    left = jax.eval_shape(recipe.leave, w1, w2, state, X)
    for found in (left, jax.eval_shape(recipe.adjust_gradients, w1, w2, w1, w2, state)):
        assert [a.dtype for a in found] == [jnp.bfloat16] * 2


METHODS = "refresh", "refit", "leave", "adjust_gradients"
STATEFUL = {name: recipe for name, recipe in RECIPES.items() if recipe.State is not Dense.State}
READ = [(name, of) for name, recipe in STATEFUL.items() for of in METHODS if getattr(recipe, of) != getattr(Recipe, of)]


@pytest.mark.parametrize("name, method", READ)
def test_what_reads_a_state_refuses_all_but_one_of_this_recipe_and_these_weights(name, method):
    def call(w1, w2, state):
        gradients = (w1, w2) if method == "adjust_gradients" else ()
        return getattr(examples.RECIPES[name], method)(*gradients, w1, w2, state)

    state = entered(name)[0]
    for other in (None, Dense.State(), tuple(state)):
        with pytest.raises(ValueError, match=f"recipe '{name}' reads a state: make one with enter"):
            call(W1, W2, other)
    with pytest.raises(ValueError, match=r"w1 \[1, .* must be \[F, D\] and \[F, D\]"):  # stacked, without vmap
        call(W1[None], W2[None], state)
    with pytest.raises(ValueError, match=r"of the state must be .* enter it with the same knobs and weights"):
        call(W1, W2, jax.tree.map(lambda a: a[None], state))


@pytest.mark.parametrize("name", RECIPES)
def test_a_state_that_was_never_entered_gives_nan(name):
    recipe = examples.RECIPES[name]
    state, fresh = entered(name)[0], recipe.init_state(W1, W2)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, fresh)
    if state:
        assert jnp.isnan(examples.output(recipe)(X, W1, W2, fresh)).all()
