"""The phase transitions of a training state keep what they promise to keep.

What a recipe does with the arrays of one layer is tested in tests/recipes/test_phase.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sparse_lm.model import llama
from sparse_lm.ops.norm import rms_norm
from sparse_lm.recipes import DENSE, Slices
from sparse_lm.training import transitions as transitions_lib
from sparse_lm.training.ffn_weights import matrices
from sparse_lm.training.transitions import dense_params, make_transitions, transition_before
from tests import small
from tests.recipes.numpy_routing import clusters, means

DENSE_LAYERS = {"fst": 0, "slices": 1}


def config_of(recipe):
    """Three layers: the inputs of the last one are another recipe's also where the first one is dense."""
    return small.config(recipe, **{"sparsity.dense_layers": DENSE_LAYERS[recipe], "model.layers": 3})


@functools.cache
def _after_sparse_steps(recipe):
    """Three states of a run: after three dense steps, as its sparse phase begins, and two steps later."""
    config = config_of(recipe)
    trainer, transitions = small.compiled(config)
    states = [small.after_dense_steps(config, 3)]
    states.append(transitions["enter"](small.after_dense_steps(config, 3), small.windows(config, 100))[0])
    states[1:] = jax.device_get(states[1:])
    state = jax.device_put(states[1])
    for step in range(2):
        state, _ = trainer.steps["sparse"](state, small.windows(config, 50 + step))
    return *jax.device_get(states), jax.device_get(state)


def states_of(recipe):
    return jax.device_put(_after_sparse_steps(recipe))


def moments(state):
    return [optax.tree.get(state.opt_state, name) for name in ("mu", "nu")]


# Entering


@pytest.mark.long
def test_neurons_are_sorted_with_their_weights_and_moments():
    """Neurons change places as wholes, by which the dense function stays what it was."""
    before, after, _ = states_of("slices")
    config = config_of("slices")
    trees = ((state.params, *moments(state)) for state in (before, after))
    old, new = ([np.asarray(w) for tree in of_state for w in matrices(tree)] for of_state in trees)
    for layer in range(config.model.layers):
        place = {row.tobytes(): i for i, row in enumerate(old[0][layer])}
        order = [place[row.tobytes()] for row in new[0][layer]]
        assert sorted(order) == list(range(config.model.ffn_dim)) != order
        for a, b in zip(old, new, strict=True):
            np.testing.assert_array_equal(a[layer][order], b[layer])


@pytest.mark.parametrize("sample, every_window, every_token, microbatches", [(48, 2, 1, 2), (8, 4, 4, 1)])
def test_windows_are_left_out_before_tokens_and_the_same_in_parts(
    monkeypatch, sample, every_window, every_token, microbatches
):
    """However many microbatches share a batch of 4 windows, the recipe sees the same tokens of it."""
    config = small.config("slices")
    trainer, _ = small.compiled(config)
    windows, entered = small.windows(config), small.entered(config)  # others share it: before what is changed below
    assert windows.shape == (4, 33)
    monkeypatch.setattr(transitions_lib, "SAMPLE", sample)
    monkeypatch.setattr(Slices, "refresh", lambda self, w1, w2, state, x: (state, {"x": x}))

    transitions = make_transitions(dataclasses.replace(config, microbatches=microbatches), trainer.graphdef)
    seen = transitions["refresh"](small.entered(config), windows)[1]["x"]
    wanted = [x[::every_token] for x in routed(config, entered, windows[::every_window])]
    np.testing.assert_allclose(seen, wanted, rtol=1e-4, atol=1e-4)


# Refreshes


def routed(config, state, windows):
    """The FFN inputs of each layer, [T, D], in a forward pass that is sparse from `dense_layers` on."""
    model, dense_layers = llama.merge(llama.graphdef(config.model), state.params), config.sparsity.dense_layers
    structure, stacked = nnx.split(model.layers)

    @functools.partial(jax.jit, static_argnums=0)
    def one(recipe, layer, own, x):
        layer = nnx.merge(structure, layer)
        x = x + layer.attention(rms_norm(x, layer.attention_norm[...], config.model.norm_epsilon))
        tokens = rms_norm(x, layer.ffn_norm[...], config.model.norm_epsilon).reshape(-1, config.model.dim)
        return tokens, x + recipe.ffn(tokens, layer.ffn.up[...], layer.ffn.down[...], own)[0].reshape(x.shape)

    x, found = model.embed(windows[:, :-1]), []
    for number in range(config.model.layers):
        layer, own = jax.tree.map(lambda a: a[number], (stacked, state.recipe_state))  # noqa: B023
        recipe = DENSE if number < dense_layers else config.sparsity.recipe
        tokens, x = one(recipe, layer, own, x)
        found.append(np.asarray(tokens, np.float64))
    return found


def test_entering_clusters_all_inputs_of_the_dense_forward():
    config, windows = small.config("slices"), small.windows(small.config("slices"))
    dense = dataclasses.replace(config, sparsity=dataclasses.replace(config.sparsity, dense_layers=config.model.layers))
    inputs = routed(dense, small.entered(config), windows)  # which the order of neurons does not change
    expected = [clusters(x, config.sparsity.recipe.experts) for x in inputs]
    np.testing.assert_allclose(small.entered(config).recipe_state.centroids, expected, atol=1e-4)


def test_a_refresh_moves_centroids_to_the_tokens_that_the_sparse_forward_routes():
    """Those of dense layers stay, and nothing else moves."""
    config, windows = config_of("slices"), small.windows(config_of("slices"), 7)
    _, transitions = small.compiled(config)
    state = _after_sparse_steps("slices")[2]
    after, metrics = jax.device_get(transitions["refresh"](jax.device_put(state), windows))
    old, new = state.recipe_state.centroids, after.recipe_state.centroids
    expected = [means(x, c) for x, c in zip(routed(config, state, windows), old, strict=True)]
    np.testing.assert_array_equal(new[0], old[0])
    np.testing.assert_allclose(new[1:], expected[1:], atol=2e-5)
    assert (np.abs(expected[1:] - old[1:]).max(axis=(1, 2)) > 0.01).all()
    recipe_state = state.recipe_state._replace(centroids=new)
    jax.tree.map(np.testing.assert_array_equal, after, dataclasses.replace(state, recipe_state=recipe_state))
    assert metrics == {}


def test_a_refresh_tells_of_no_flips_in_layers_that_stay_dense():
    """Their masks stay, however far the weights have moved."""
    config = small.config("fst", **{"sparsity.dense_layers": 1})
    _, transitions = small.compiled(config)
    state = _after_sparse_steps("fst")[2]
    after, metrics = jax.device_get(transitions["refresh"](jax.device_put(state), small.windows(config)))
    flipped = [(a != b).mean((1, 2)) for a, b in zip(state.recipe_state[:2], after.recipe_state[:2], strict=True)]
    np.testing.assert_allclose(metrics["flip_rate"], np.mean(flipped, axis=0), rtol=1e-5)
    assert metrics["flip_rate"][1] > 0


def test_when_refreshes_are_due():
    for recipe, every, due in (("slices", 3, [7]), ("fst", 1, [5, 6, 7]), ("fst", 4, []), ("sste", 1, [])):
        config = small.config(recipe, **{"sparsity.refresh_every": every})
        assert [step for step in range(config.steps) if transition_before(config, step) == "refresh"] == due


# Sparse steps and leaving


def test_masked_decay_shrinks_what_the_mask_prunes():
    config = config_of("fst")
    trainer, _ = small.compiled(config)
    _, state, _ = states_of("fst")
    before, mask = np.array(matrices(state.params)[0]), np.array(state.recipe_state.mask_up)
    strong = state.recipe_state._replace(decay=jnp.full_like(state.recipe_state.decay, 10.0))
    state, _ = trainer.steps["sparse"](dataclasses.replace(state, recipe_state=strong), small.windows(config))
    shrunk = np.abs(matrices(state.params)[0]) < np.abs(before)
    assert shrunk[~mask].mean() > 0.95
    assert shrunk[mask].mean() < 0.8


@pytest.mark.parametrize("recipe", DENSE_LAYERS)
def test_leaving_changes_the_weights_of_sparse_layers_alone_and_once(recipe):
    """Leaving reads the inputs of the sparse forward. A run that is made longer after its end leaves once more."""
    config, (*_, state) = config_of(recipe), states_of(recipe)
    _, transitions = small.compiled(config)
    before, inputs = jax.device_get(state), None
    if config.sparsity.recipe.leave_reads_inputs:
        inputs = np.stack(routed(config, before, small.windows(config))).astype(np.float32)
    leave = jax.jit(functools.partial(dense_params, sparsity=config.sparsity))
    params = jax.device_get(leave(state.params, state.recipe_state, x=inputs))
    once = jax.device_get(transitions["leave"](state, small.windows(config))[0])
    (read_up, read_down), (up, down) = matrices(params), matrices(once.params)
    np.testing.assert_allclose(read_down, down, rtol=1e-6)
    np.testing.assert_allclose(read_up, up, atol=1e-4)
    for old, new in zip(matrices(before.params), matrices(once.params), strict=True):
        changed = (old != new).any(axis=(1, 2))
        np.testing.assert_array_equal(changed, np.arange(len(old)) >= DENSE_LAYERS[recipe])
    whole = dict(once.params, layers=once.params["layers"] | {"ffn": before.params["layers"]["ffn"]})
    jax.tree.map(np.testing.assert_array_equal, whole, before.params)
    jax.tree.map(np.testing.assert_array_equal, once.opt_state, before.opt_state)
    twice = jax.device_get(transitions["leave"](jax.device_put(once), small.windows(config))[0])
    jax.tree.map(np.testing.assert_array_equal, once, twice)
