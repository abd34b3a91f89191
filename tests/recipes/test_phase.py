"""Entering, refreshing and leaving the sparse phase, on the arrays of one FFN."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.recipes import DENSE, Slices
from tests.recipes import examples
from tests.recipes import masked_dense_ffn as dense64
from tests.recipes.examples import DIM, INPUTS, NEURONS, W1, W2, X
from tests.recipes.examples import OF_FFNS as RECIPES
from tests.recipes.numpy_routing import means, nearest, unit

SCALED = {"sste": 0, "venom": 1, "slices": 1}
"""Recipes whose weights are 2:4 by soft threshold, and the axis of W2's groups."""


@functools.cache
def enter(recipe):
    return jax.jit(recipe.enter)


@functools.cache
def entered(name):
    return enter(examples.RECIPES[name])(W1, W2, X)


def stacked(state):
    return jax.tree.map(lambda a: jnp.stack([a, a]), state)


def groups_of_four(w, axis):
    return np.moveaxis(np.asarray(w), axis, -1).reshape(-1, 4)


def test_only_slices_move_neurons():
    orders = {name: entered(name)[1] for name in RECIPES}
    assert [name for name, order in orders.items() if order is not None] == ["slices", "dense_slices"]
    order = np.asarray(orders["slices"])
    np.testing.assert_array_equal(np.sort(order), np.arange(NEURONS))
    assert (order != np.arange(NEURONS)).mean() > 0.5


def test_the_dense_function_does_not_see_the_order_of_neurons():
    _, order = entered("slices")
    before, after = (examples.output(DENSE)(X, w1, w2, None) for w1, w2 in ((W1, W2), (W1[order], W2[order])))
    np.testing.assert_allclose(before, after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["slices", "dense_slices"])
def test_all_leading_axes_of_inputs_are_tokens(name):
    recipe, (state, order) = examples.RECIPES[name], entered(name)
    batch = X.reshape(4, -1, DIM)
    jax.tree.map(np.testing.assert_array_equal, enter(recipe)(W1, W2, batch), (state, order))
    refreshed = [jax.jit(recipe.refresh)(W1, W2, state, x) for x in (X, batch)]
    jax.tree.map(np.testing.assert_array_equal, *refreshed)


@pytest.mark.parametrize("shards", [1, 2])
def test_slices_hold_the_neurons_that_their_tokens_use_most(shards):
    """Centroids are k-means of the tokens; a neuron's activation is that of the 2:4 weights."""
    recipe = Slices(m=16, v=16, shards=shards)
    state, order = enter(recipe)(W1, W2, X)
    centroids = unit(INPUTS.x[:: len(INPUTS.x) // 4])
    for _ in range(10):
        centroids = means(INPUTS.x, centroids)
    np.testing.assert_allclose(state.centroids, centroids, atol=1e-5)
    h = INPUTS.x @ dense64.soft_threshold(INPUTS.w1, axis=1).T
    energy = np.square(np.square(np.maximum(h, 0)))
    experts = nearest(INPUTS.x, centroids)
    by_expert = np.stack([energy[experts == e].sum(0) for e in range(4)])
    owner = np.empty(NEURONS, int)
    owner[np.asarray(order)] = np.tile(np.repeat(np.arange(4), NEURONS // 4 // shards), shards)
    own = by_expert[owner, np.arange(NEURONS)]
    least = np.array([own[owner == e].min() for e in range(4)])
    assert not ((by_expert > own * (1 + 1e-4)) & (by_expert > least[:, None] * (1 + 1e-4))).any()
    assert own.sum() / by_expert.sum() > 0.4  # a quarter by chance


def test_venoms_centroids_are_among_the_neurons():
    recipe = examples.RECIPES["venom"]
    centroids = unit(INPUTS.w1[:: NEURONS // recipe.experts])
    for _ in range(10):
        centroids = means(INPUTS.w1, centroids)
    np.testing.assert_allclose(entered("venom")[0].centroids, centroids, atol=1e-5)


@pytest.mark.parametrize("name", SCALED)
def test_scales_are_the_least_squares_fit(name):
    state, _ = entered(name)
    for scale, w, axis in ((state.scale_up, INPUTS.w1, 1), (state.scale_down, INPUTS.w2, SCALED[name])):
        s = dense64.soft_threshold(w, axis)
        assert float(scale) == pytest.approx((w * s).sum() / (s * s).sum(), rel=1e-5)


def test_masks_have_two_ones_in_every_row_and_column_of_a_tile():
    state, _ = entered("fst")
    for mask, w in ((state.mask_up, W1), (state.mask_down, W2)):
        tiles = np.asarray(mask).reshape(NEURONS // 4, 4, DIM // 4, 4)
        assert (tiles.sum(1) == 2).all() and (tiles.sum(3) == 2).all()
        assert np.abs(w)[mask].sum() > 1.3 * np.abs(w)[~mask].sum()
    assert float(state.decay) == examples.RECIPES["fst"].mask_decay


@pytest.mark.parametrize("name", ["slices", "dense_slices"])
def test_neurons_are_sorted_by_inputs_in_bfloat16(name):
    """A CPU refuses some products of bfloat16 when they run, not when they compile."""
    _, order = enter(examples.RECIPES[name])(W1, W2, X.astype(jnp.bfloat16))
    np.testing.assert_array_equal(np.sort(order), np.arange(NEURONS))


def test_entering_slices_needs_inputs():
    with pytest.raises(ValueError, match=r"enter\(w1, w2, x\) needs a batch x"):
        Slices(m=16).enter(W1, W2)
    with pytest.raises(ValueError, match=r"refresh\(w1, w2, state, x\) needs a batch x"):
        Slices(m=16).refresh(W1, W2, entered("slices")[0])
    assert [name for name, recipe in RECIPES.items() if recipe.enter_reads_inputs] == ["slices", "dense_slices"]


def test_tokens_that_are_not_finite_spoil_no_state():
    """Nor do they count: the state is that of the other tokens."""
    recipe = examples.RECIPES["slices"]
    bad = np.arange(5, 90, 24)  # none of them a start of k-means
    spoiled = X.at[bad, 3].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf, jnp.nan]))
    state, order = enter(recipe)(W1, W2, spoiled)
    good = np.delete(INPUTS.x, bad, axis=0)
    centroids = unit(INPUTS.x[:: len(INPUTS.x) // 4])
    for _ in range(10):
        centroids = means(good, centroids)
    np.testing.assert_allclose(state.centroids, centroids, atol=1e-5)
    np.testing.assert_array_equal(np.sort(order), np.arange(NEURONS))
    for x in (spoiled, jnp.full_like(X, jnp.nan)):
        refreshed, _ = jax.jit(recipe.refresh)(W1, W2, state, x)
        recipe.check_state(stacked(refreshed))
    recipe.check_state(stacked(enter(recipe)(W1, W2, jnp.full_like(X, jnp.nan))[0]))


# Refresh


def test_a_refresh_of_slices_moves_centroids_to_their_tokens_and_nothing_else():
    state, _ = entered("slices")
    x = examples.random(8, *X.shape)
    moved, metrics = jax.jit(examples.RECIPES["slices"].refresh)(3 * W1, W2, state, x)
    np.testing.assert_allclose(moved.centroids, means(x, np.asarray(state.centroids)), atol=1e-5)
    assert np.abs(moved.centroids - state.centroids).max() > 0.01
    jax.tree.map(np.testing.assert_array_equal, state, moved._replace(centroids=state.centroids))
    assert metrics == {}


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


# Leaving


PAIRED = np.arange(NEURONS) % 2 == 1


def paired(w1):
    """Weights whose every second neuron is the one before with its sign changed: of four, at most two are active."""
    return jnp.where(PAIRED[:, None], -jnp.roll(w1, 1, axis=0), w1)


@pytest.mark.parametrize("name", RECIPES)
def test_leaving_keeps_the_function_that_the_sparse_weights_computed(name):
    """Dense products of the weights that are left give the sparse output where activations lose nothing to 2:4."""
    recipe = examples.RECIPES[name]
    if name in ("venom", "slices", "dense_slices"):
        recipe = dataclasses.replace(recipe, m=4)  # no neuron is left out but by 2:4
    w1 = paired(W1)
    state, order = enter(recipe)(w1, W2, X)
    recipe = recipe.for_evaluation()
    order = np.arange(NEURONS) if order is None else order
    left = jax.jit(recipe.leave)(w1[order], W2[order], state)
    sparse = examples.output(recipe)(X, w1[order], W2[order], state)
    np.testing.assert_allclose(examples.output(DENSE)(X, *left, None), sparse, rtol=1e-4, atol=1e-4)
    if recipe.sparse_weights:
        assert np.abs(examples.output(DENSE)(X, w1, W2, None) - sparse).max() > 0.1
    else:
        jax.tree.map(np.testing.assert_array_equal, left, (w1[order], W2[order]))


@pytest.mark.parametrize("name", RECIPES)
def test_weights_that_are_left_are_two_of_four_where_the_recipe_says(name):
    recipe = examples.RECIPES[name]
    left = dict(zip(("up", "down"), jax.jit(recipe.leave)(W1, W2, entered(name)[0]), strict=True))
    inputs = {"up": 1, "down": 0}  # the axis of [F, D] along which a linear layer's inputs run
    along = [n for n, w in left.items() if (np.count_nonzero(groups_of_four(w, inputs[n]), axis=1) <= 2).all()]
    assert along == list(recipe.sparse_along_inputs)
    if name in ("venom", "slices"):
        assert (np.count_nonzero(groups_of_four(left["down"], 1), axis=1) <= 2).all()


@pytest.mark.parametrize("name", RECIPES)
def test_leaving_again_changes_nothing(name):
    """The state follows from the weights as they are left, or is that of a new sparse phase."""
    recipe = examples.RECIPES[name]
    leave, (state, _) = jax.jit(recipe.leave), entered(name)
    once = leave(W1, W2, state)
    refit = jax.jit(recipe.refit)(*once, state)
    jax.tree.map(np.testing.assert_array_equal, once, leave(*once, refit))
    if name in SCALED:
        assert float(refit.scale_up) == float(refit.scale_down) == 1
        again, _ = enter(recipe)(*once, X)
        assert float(again.scale_up) == float(again.scale_down) == 1


def test_evaluation_without_a_refit_is_seen():
    """The scale of the phase is not 1, so that leaving twice without a refit would scale weights twice."""
    state, _ = entered("sste")
    leave = jax.jit(examples.RECIPES["sste"].leave)
    once = leave(W1, W2, state)
    assert np.abs(leave(*once, state)[0] - once[0]).max() > 0.1


# Gradients


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_adjusted_by_fst_alone(name):
    recipe, state = examples.RECIPES[name], entered(name)[0]
    dw1, dw2 = examples.random(10, *W1.shape), examples.random(11, *W2.shape)
    adjusted = recipe.adjust_gradients(dw1, dw2, W1, W2, state)
    if name == "fst":
        expected = dw1 + 0.5 * W1 * ~state.mask_up, dw2 + 0.5 * W2 * ~state.mask_down
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), adjusted, expected)
    else:
        jax.tree.map(np.testing.assert_array_equal, adjusted, (dw1, dw2))


def test_masked_decay_shrinks_what_the_mask_prunes():
    recipe, (state, _) = examples.RECIPES["fst"], entered("fst")
    for w, dw, mask in zip(
        (W1, W2), recipe.adjust_gradients(0 * W1, 0 * W2, W1, W2, state), (state.mask_up, state.mask_down), strict=True
    ):
        stepped = np.abs(w - 0.1 * dw)
        assert (stepped < np.abs(w))[~mask].all()
        np.testing.assert_array_equal(stepped[mask], np.abs(w)[mask])


# Validity


@pytest.mark.parametrize("name", RECIPES)
def test_a_state_is_valid_once_it_is_entered(name):
    recipe = examples.RECIPES[name]
    state, fresh = entered(name)[0], recipe.init_state(W1, W2)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == jax.tree.map(lambda a: (a.shape, a.dtype), fresh)
    recipe.check_state(stacked(state))
    if state:
        with pytest.raises(ValueError, match="in every layer"):
            recipe.check_state(stacked(fresh))
        o = examples.output(recipe)(X, W1, W2, fresh)
        assert jnp.isnan(o).all()


def random_mask(shape):
    """2:4 along rows, each row for itself: not along columns too."""
    order = np.random.default_rng(0).random((*shape[:-1], shape[-1] // 4, 4)).argsort(axis=-1)
    return jnp.asarray((order < 2).reshape(shape))


BROKEN = {
    "fst": {
        "mask_up": [lambda mask: mask.at[1].set(random_mask(mask.shape[1:]))],
        "mask_down": [
            lambda mask: mask.at[1, 7, 9].set(~mask[1, 7, 9]),
            lambda mask: mask.at[1].set(random_mask(mask.shape[:0:-1]).T),
        ],
    },
    "slices": {
        "scale_up": [lambda scale: scale.at[1].set(jnp.nan)],
        "scale_down": [lambda scale: scale.at[1].set(0), lambda scale: scale.at[0].set(jnp.inf)],
        "centroids": [lambda centroids: centroids.at[1, 0, 0].set(jnp.inf)],
    },
}


@pytest.mark.parametrize("name", ["fst", "sste", "venom", "slices"])
def test_a_state_that_is_broken_is_refused_by_name(name):
    recipe, state = examples.RECIPES[name], stacked(entered(name)[0])
    for field, breaks in BROKEN["fst" if name == "fst" else "slices"].items():
        for broken in breaks if hasattr(state, field) else ():
            with pytest.raises(ValueError, match=rf"^{field}.* in every layer$"):
                recipe.check_state(state._replace(**{field: broken(getattr(state, field))}))


def test_transposed_masks_are_valid_too():
    masks = stacked(entered("fst")[0])
    transposed = masks._replace(mask_up=masks.mask_up.swapaxes(1, 2), mask_down=masks.mask_down.swapaxes(1, 2))
    examples.RECIPES["fst"].check_state(transposed)
