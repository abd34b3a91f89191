"""Assignment of tokens and neurons to experts, centroids, and the order of rows, where formulas of recipes end."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.recipes import routing
from sparse_lm.recipes.groups import fitting_block
from tests.ops.operands import random
from tests.recipes.numpy_routing import means, nearest, unit

assign_neurons = jax.jit(routing.assign_neurons)
cluster = jax.jit(routing.cluster, static_argnums=1)
update_centroids = jax.jit(routing.update_centroids)
order_neurons = jax.jit(routing.order_neurons, static_argnums=3)
dispatch_order = jax.jit(routing.dispatch_order, static_argnums=(1, 2))


def test_ties_and_nan_go_to_the_lowest_expert():
    centroids = jnp.array([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    x = jnp.array([[0.0, 2.0], [jnp.nan, 5.0], [3.0, 0.0], [0.0, 0.0]])
    np.testing.assert_array_equal(routing.assign_tokens(x, centroids), [0, 0, 2, 0])


def test_a_token_of_zeros_has_no_direction_but_counts_and_a_centroid_without_tokens_stays():
    x, centroids = np.array([[0, 0], [3, 4]], np.float32), np.array([[1, 1], [-1, -1]], np.float32)
    np.testing.assert_allclose(update_centroids(x, centroids), [[0.3, 0.4], [-1, -1]], rtol=1e-6)


@pytest.mark.parametrize("size", [1e-8, 1e-16, 1e-20, 1e-30, 1e-40, 1e20])
def test_no_token_counts_for_more_than_another_however_short_or_long(size):
    x, centroids = np.array(random((50, 8))), random((5, 8), seed=1)
    x[7] *= np.float32(size)
    experts = np.asarray(routing.assign_tokens(jnp.asarray(x), centroids))
    own = experts == experts[7]
    others = unit(x[own & (np.arange(50) != 7)]).sum(axis=0)
    assert np.linalg.norm(own.sum() * update_centroids(x, centroids)[experts[7]] - others) < 1 + 1e-5


def test_tokens_that_are_not_finite_count_for_nothing():
    x, centroids = (np.array(random((rows, 8), seed=rows)) for rows in (50, 5))
    spoiled = x.copy()
    spoiled[[3, 20, 30], [0, 7, 5]] = np.nan, np.inf, -np.inf
    moved = update_centroids(spoiled, centroids)
    np.testing.assert_allclose(moved, means(np.delete(x, [3, 20, 30], axis=0), centroids), atol=1e-6)
    y = np.where(np.isfinite(spoiled).all(1, keepdims=True), np.abs(random((50, 20))), np.nan)
    without = [[np.delete(a, rows, axis=0) for a in (spoiled, y)] for rows in ([], [3, 20, 30])]
    np.testing.assert_array_equal(*(order_neurons(*tokens, centroids, 1) for tokens in without))
    every_row_bad = np.full_like(x, np.inf)
    np.testing.assert_array_equal(update_centroids(every_row_bad, centroids), centroids)
    for rows in (spoiled[3:], every_row_bad):  # the first row is where the first centroid starts
        assert np.isfinite(cluster(rows, 5)).all()


@pytest.mark.parametrize("sequences", [16, 64])
def test_every_expert_has_tokens_though_all_sequences_begin_alike(sequences):
    """As with a token that stands before each text."""
    x = jnp.reshape(random((sequences * 32, 16)), (sequences, 32, 16))
    tokens = x.at[:, 0].set(x[0, 0]).reshape(-1, 16)
    assert min(routing.expert_load(routing.assign_tokens(tokens, cluster(tokens, 16)), 16)) > 0.01


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.integers(0, 10**6), st.integers(1, 5), st.booleans(), st.sampled_from([1, 8]))
def test_blocks_are_of_one_expert_whose_tokens_keep_their_order(seed, used, ordered, v):
    rng = np.random.default_rng(seed)
    experts, order = rng.integers(used, size=61), rng.permutation(61) if ordered else np.arange(61)
    rows, block_experts = dispatch_order(experts, 5, v, order if ordered else None)
    slots, block_experts = np.asarray(rows.slots), np.asarray(block_experts)
    np.testing.assert_array_equal(slots[rows.position], np.arange(61))
    assert slots.shape == ((61 + 5 * (v - 1)) // v * v,) and block_experts.shape == (len(slots) // v,)
    by_expert = np.concatenate([order[experts[order] == e] for e in range(5)])
    np.testing.assert_array_equal(slots[slots < 61], by_expert)
    blocks = np.append(experts, -1)[slots].reshape(-1, v)
    for block, expert in zip(blocks, block_experts, strict=True):
        assert set(block) <= {expert, -1} and 0 <= expert < 5
    counts = np.bincount(experts, minlength=5)
    assert (blocks >= 0).any(1).sum() == np.sum(-(-counts // v))


def test_a_block_has_no_more_slots_than_an_expert_has_pairs_of_an_even_load():
    assert [fitting_block(256, pairs, 4) for pairs in (1, 11, 12, 16, 31, 5000)] == [1, 2, 2, 4, 4, 256]


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.integers(0, 10**6))
def test_no_neuron_and_expert_would_rather_have_each_other(seed):
    """The assignment is stable, and every expert has as many neurons."""
    energy = np.random.default_rng(seed).permutation(96).reshape(4, 24).astype(np.float32)
    owner = np.asarray(assign_neurons(energy))
    np.testing.assert_array_equal(np.bincount(owner, minlength=4), 6)
    own = energy[owner, np.arange(24)]
    least = np.array([own[owner == e].min() for e in range(4)])
    assert not ((energy > own) & (energy > least[:, None])).any()


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
def test_neurons_are_shared_out_evenly_whatever_their_energy(value):
    energy = random((4, 24)).at[1:3, ::5].set(value)
    for given in (energy, np.full((4, 24), value)):
        np.testing.assert_array_equal(np.bincount(assign_neurons(given)), 6)


def test_activations_whose_squares_are_no_float16_order_neurons_as_in_float32():
    x, centroids = random((64, 16), jnp.float16, seed=1), random((4, 16), seed=2)
    y = jnp.abs(random((64, 32), jnp.float16, seed=3, scale=200.0))
    np.testing.assert_array_equal(*(order_neurons(x, a, centroids, 1) for a in (y, y.astype(jnp.float32))))


def test_vectors_away_from_others_solve_the_weighted_regression():
    x, centroids = np.array(random((600, 24), seed=1)), np.array(random((3, 24), seed=2))
    spoiled = np.copy(x[:200])
    spoiled[:100, 0], spoiled[100:, 1] = np.nan, np.inf
    away = jax.jit(routing.away_from_others)(np.concatenate([x, spoiled]), centroids)
    directions, experts = unit(x), nearest(x, centroids)
    for expert, found in enumerate(away):
        own = experts == expert
        weights = np.where(own, 0.5 / own.sum(), 0.5 / (~own).sum())
        curvature = (weights * directions.T) @ directions + 0.03 / 24 * np.eye(24)
        wanted = np.linalg.solve(curvature, directions.T @ np.where(own, 0, -weights))
        assert np.linalg.norm(found - wanted) < 0.03 * np.linalg.norm(wanted)
