"""Centres that k-means places among the neurons, or among the tokens of a batch, which they follow from then on."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from sparse_lm.model import llama
from sparse_lm.ops import routing
from sparse_lm.training.step import forward_loss
from sparse_lm.training.transitions import make_transitions, needs_refresh
from sparse_lm.training.validity import check_variables
from tests import small
from tests.ops import masked_dense_ffn as dense64

FOLLOWING = ["slices", "cluster_sets"]


@functools.cache
def entered(recipe, dense_layers=0):
    """A run at the first step of its sparse phase: configuration, trainer, transitions and state."""
    config = small.config(recipe, **{"sparsity.centres": "tokens", "sparsity.dense_layers": dense_layers})
    return config, *small.compiled(config), jax.device_get(small.entered(config))


@functools.cache
def later(recipe, dense_layers=0):
    """The same with other weights, as if trained, and another batch."""
    config, trainer, transitions, state = entered(recipe, dense_layers)
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda w: w + np.float32(0.02) * rng.standard_normal(w.shape, np.float32), state.params)
    return config, trainer, transitions, dataclasses.replace(state, params=params), small.windows(config, 1)


def nearness(config, trainer, state, windows, centroids):
    """Mean cosine between a token and its centre, [L], and the sums over each cluster's tokens."""
    variables = dataclasses.replace(state.variables, centroids=centroids)
    options = dict(config=config, graphdef=trainer.graphdef, plan=trainer.plan.for_measuring())
    measure = jax.jit(functools.partial(forward_loss, **options))
    sums = jax.device_get(measure(state.params, variables, windows, None)[1]["clusters"])
    directions = centroids / np.linalg.norm(centroids, axis=-1, keepdims=True)
    return (sums.inputs * directions).sum((1, 2)) / sums.tokens.sum(1), sums


def test_centres_of_tokens_are_where_the_tokens_are():
    config, trainer, _, state = entered("cluster_sets")
    windows = small.windows(config)
    near, sums = nearness(config, trainer, state, windows, np.asarray(state.variables.centroids))
    start, _ = nearness(config, trainer, state, windows, sums.candidates)
    assert (near > start + 0.02).all()
    assert (sums.tokens > 0).all()


@pytest.mark.parametrize("distance", ["cosine", "l2"])
def test_centres_of_neurons_are_ten_iterations_of_k_means_by_the_distance(distance):
    config = small.config("cluster_sets", **{"sparsity.distance": distance})
    up = small.after_dense_steps(config, 0).params["layers"]["ffn"]["up"]
    keys = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), 0), len(up))
    options = dict(clusters=config.sparsity.clusters, balanced=False, distance=distance, iterations=10)
    for w, key, centroids in zip(up, keys, small.entered(config).variables.centroids, strict=True):
        expected, _ = routing.cluster_neurons(w, key=key, **options)
        np.testing.assert_allclose(centroids, expected, rtol=1e-5, atol=1e-6)


def routed(config, trainer, state, windows, *, sparse=True):
    """Of each layer that is not dense the FFN's inputs at length 1, the cluster of each and the energy of all neurons.

    The FFN is NumPy; without `sparse` all neurons reach the next layer.
    """
    model = llama.merge(trainer.graphdef, state.params)
    structure, stacked = nnx.split(model.layers)
    epsilon = config.model.norm_epsilon

    @jax.jit
    def attend(layer, x):
        layer = nnx.merge(structure, layer)
        x = x + layer.attention(llama.rms_norm(x, layer.attention_norm[...], epsilon))
        return x, llama.rms_norm(x, layer.ffn_norm[...], epsilon)

    x, found = model.embed(windows[:, :-1]), []
    for number in range(config.model.layers):
        layer, v = jax.tree.map(lambda a: a[number], (stacked, state.variables))  # noqa: B023
        x, tokens = attend(layer, x)
        tokens = np.asarray(tokens, np.float64).reshape(-1, config.model.dim)
        w1, w2 = (np.asarray(state.params["layers"]["ffn"][name][number], np.float64) for name in ("up", "down"))
        is_dense = number < config.sparsity.dense_layers
        if not is_dense:
            w1 = v.scale_up * dense64.soft_threshold(w1, axis=1)
            w2 = v.scale_down * dense64.soft_threshold(w2, axis=1)
        y = np.square(np.maximum(tokens @ w1.T, 0))
        if not is_dense:
            clusters = (tokens @ unit(v.centroids).T).argmax(1)
            found.append((unit(tokens), clusters, np.square(y)))
            if sparse:
                y = y * dense64.listed_mask(y, v.columns[clusters], v=1)
        x = x + (y @ w2).reshape(x.shape).astype(np.float32)
    return found


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def means(tokens, clusters, empty):
    """The mean token of each cluster; that of `empty` where there is none."""
    return np.stack([tokens[clusters == e].mean(0) if (clusters == e).any() else empty[e] for e in range(len(empty))])


@pytest.mark.parametrize("recipe, dense_layers", [("slices", 0), ("cluster_sets", 1)])
def test_a_refresh_moves_centres_to_the_tokens_that_the_sparse_forward_routes(recipe, dense_layers):
    config, trainer, transitions, state, windows = later(recipe, dense_layers)
    after, _ = transitions.refresh(jax.device_put(state), windows)
    by_layer = zip(
        state.variables.centroids[dense_layers:],
        after.variables.centroids[dense_layers:],
        routed(config, trainer, state, windows),
        routed(config, trainer, state, windows, sparse=False),
        strict=True,
    )
    for number, (old, new, (tokens, clusters, _), (of_all, clusters_of_all, _)) in enumerate(by_layer):
        expected = means(tokens, clusters, old)
        np.testing.assert_allclose(new, expected, atol=2e-5)
        assert np.abs(expected - old).max() > 0.01
        if number:  # the first one's inputs are the same
            assert np.abs(expected - means(of_all, clusters_of_all, old)).max() > 1e-3


def test_layers_that_stay_dense_have_no_centres_to_move():
    config, _, transitions, state, windows = later("cluster_sets", 1)
    after, metrics = transitions.refresh(jax.device_put(state), windows)
    np.testing.assert_array_equal(after.variables.centroids[0], state.variables.centroids[0])
    assert metrics["kept_set_energy"][0] == 1 > metrics["kept_set_energy"][1]
    check_variables(after.variables, config, config.sparsity.start_step + 1)


@pytest.mark.parametrize("recipe", FOLLOWING)
def test_a_refresh_moves_no_neuron_and_no_centre_without_tokens(recipe):
    _, _, transitions, state, windows = later(recipe)
    centroids = state.variables.centroids.copy()
    centroids[:, -1] = centroids[:, 0]  # of equally near centres a token takes the first
    state = dataclasses.replace(state, variables=dataclasses.replace(state.variables, centroids=centroids))
    after, _ = jax.device_get(transitions.refresh(jax.device_put(state), windows))
    np.testing.assert_array_equal(after.variables.centroids[:, -1], centroids[:, -1])
    assert (after.variables.centroids[:, 0] != centroids[:, 0]).any()
    columns = (state if recipe == "slices" else after).variables.columns  # sets are chosen anew, slices stay
    variables = dataclasses.replace(state.variables, centroids=after.variables.centroids, columns=columns)
    jax.tree.map(np.testing.assert_array_equal, after, dataclasses.replace(state, variables=variables))


def test_a_refresh_chooses_sets_by_the_energy_in_the_sparse_forward():
    config, trainer, transitions, state, windows = later("cluster_sets")
    after, metrics = transitions.refresh(jax.device_put(state), windows)
    m, count = config.sparsity.m, config.sparsity.clusters
    for number, (_, clusters, energy) in enumerate(routed(config, trainer, state, windows)):
        by_cluster = np.stack([energy[clusters == e].sum(0) for e in range(count)])
        best = np.sort(by_cluster.reshape(count, -1, m))[..., -4:].sum() / by_cluster.sum()
        chosen = np.take_along_axis(by_cluster, np.asarray(after.variables.columns[number]), axis=1).sum()
        assert chosen / by_cluster.sum() == pytest.approx(best, rel=1e-5)
        assert float(metrics["kept_set_energy"][number]) == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("recipe", small.RECIPES)
@pytest.mark.parametrize("centres", ["neurons", "tokens"])
def test_what_follows_the_model_is_refreshed_inside_the_sparse_phase(recipe, centres):
    follows = recipe in ("fst", "cluster_sets", "run_sets") or (recipe, centres) == ("slices", "tokens")
    for every, due in ((2, [6]), (1, [5, 6, 7]), (4, [])):
        config = small.config(recipe, **{"sparsity.centres": centres, "sparsity.refresh_every": every})
        assert [step for step in range(config.steps) if needs_refresh(config, step)] == (due if follows else [])


def test_every_window_counts_its_own_steps():
    windows = {"sparsity.start_step": 1, "sparsity.end_step": 6, "sparsity.extra_windows": ((8, 12),)}
    config = small.config("cluster_sets", **windows)
    assert [step for step in range(config.steps) if needs_refresh(config, step)] == [3, 5, 10]


@pytest.mark.parametrize("recipe", FOLLOWING)
def test_microbatches_leave_centres_and_sets_what_they_were(recipe):
    config, trainer, _, state = entered(recipe)
    in_parts = dataclasses.replace(config, microbatches=4)
    enter = make_transitions(in_parts, trainer.plan, trainer.graphdef).enter_sparse
    after = enter(trainer.init(), small.windows(config)).variables
    np.testing.assert_allclose(after.centroids, state.variables.centroids, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(after.columns, state.variables.columns)


def test_the_entry_takes_the_memory_of_a_microbatch():
    config, trainer, _, _ = entered("slices")
    state, windows = jax.eval_shape(trainer.init), jax.ShapeDtypeStruct((64, config.seq_len + 1), np.int32)

    def temporaries(microbatches):
        changed = dataclasses.replace(config, microbatches=microbatches)
        enter = make_transitions(changed, trainer.plan, trainer.graphdef).enter_sparse
        return enter.lower(state, windows).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(16) < 0.2 * temporaries(1)
