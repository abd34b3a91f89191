import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import routing

KEY = jax.random.key(0)


def _random(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def _distances(x, centroids, distance):
    x, centroids = x.astype(np.float64), centroids.astype(np.float64)
    if distance == "cosine":
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        centroids = centroids / np.linalg.norm(centroids, axis=1, keepdims=True)
    return np.linalg.norm(x[:, None] - centroids, axis=-1)


# Clusters


@pytest.mark.parametrize("distance", ["l2", "cosine"])
@pytest.mark.parametrize("balanced", [True, False])
def test_planted_clusters_are_found(balanced, distance):
    rng = np.random.default_rng(1)
    centres = np.eye(6, 16) * 5
    truth = rng.permutation(np.repeat(np.arange(6), 8))
    w = (centres[truth] + 0.1 * rng.normal(size=(48, 16))).astype(np.float32)

    @jax.jit
    @jax.vmap
    def cluster(key):
        return routing.cluster_neurons(w, 6, key=key, balanced=balanced, distance=distance)

    starts = zip(*cluster(jax.random.split(KEY, 8)), strict=True)  # each ends in a local optimum
    _, found = min(starts, key=lambda start: _distances(w, np.asarray(start[0]), distance)[range(48), start[1]].sum())
    assert len({(int(a), int(b)) for a, b in zip(found, truth, strict=True)}) == 6


@pytest.mark.parametrize("distance", ["l2", "cosine"])
def test_cluster_sums(distance):
    x, y, centres = _random((50, 8)), np.abs(_random((50, 12), seed=1)), _random((5, 8), seed=2)
    centres[3] = -100 * x.sum(0)  # nobody's nearest, or at least not everybody's
    nearest = _distances(x, centres, distance).argmin(1)
    sums = routing.cluster_sums(x, y, centres, distance)
    rows = x if distance == "l2" else x / np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_array_equal(sums.tokens, np.bincount(nearest, minlength=5))
    np.testing.assert_allclose(sums.inputs, [rows[nearest == e].sum(0) for e in range(5)], atol=1e-5)
    np.testing.assert_allclose(sums.energy, [np.square(y[nearest == e]).sum(0) for e in range(5)], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums.candidates, rows[::10], rtol=1e-6)
    moved = sums.centroids(centres)
    for e in range(5):
        expected = rows[nearest == e].mean(0) if (nearest == e).any() else centres[e]
        np.testing.assert_allclose(moved[e], expected, atol=1e-5)


def test_a_token_of_zeros_has_no_direction():
    x, centres = np.array([[0, 0], [3, 4]], np.float32), np.array([[1, 1], [-1, -1]], np.float32)
    sums = routing.cluster_sums(x, None, centres, "cosine")
    np.testing.assert_allclose(sums.inputs, [[0.6, 0.8], [0, 0]], rtol=1e-6)


def test_a_cluster_without_tokens_keeps_its_centre():
    x, centres = np.ones((4, 2), np.float32), np.array([[1, 1], [-1, -1]], np.float32)
    sums = routing.cluster_sums(x, np.ones((4, 4), np.float32), centres, "cosine")
    np.testing.assert_array_equal(sums.tokens, [4, 0])
    np.testing.assert_array_equal(sums.centroids(centres)[1], centres[1])


def test_neurons_go_to_the_clusters_that_use_them_most():
    rng = np.random.default_rng(3)
    truth = rng.permutation(np.repeat(np.arange(4), 6))
    energy = rng.random((4, 24)).astype(np.float32) + 10 * (truth == np.arange(4)[:, None])
    np.testing.assert_array_equal(routing.assign_neurons(energy), truth)
    wanted_by_one = energy + 100 * (np.arange(4) == 0)[:, None]
    np.testing.assert_array_equal(np.bincount(routing.assign_neurons(wanted_by_one)), 6)


@pytest.mark.parametrize("distance", ["l2", "cosine"])
def test_balanced_clusters_have_equal_sizes_and_centres_at_their_means(distance):
    w = _random((60, 8))
    cluster = jax.jit(lambda w: routing.cluster_neurons(w, 5, key=KEY, balanced=True, distance=distance))
    centroids, assignment = cluster(w)
    assert centroids.dtype == jnp.float32 and assignment.dtype == jnp.int32
    np.testing.assert_array_equal(np.bincount(assignment), 12)
    rows = w if distance == "l2" else w / np.linalg.norm(w, axis=1, keepdims=True)
    means = np.stack([rows[np.asarray(assignment) == e].mean(0) for e in range(5)])
    if distance == "cosine":
        means /= np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(centroids, means, atol=1e-6)
    np.testing.assert_array_equal(cluster(w)[1], assignment)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.integers(0, 10**6))
def test_balanced_assignment_takes_the_closest_pair_that_has_room(seed):
    distances = _random((24, 4), seed)
    room, expected = [6] * 4, np.full(24, -1)
    for pair in np.argsort(distances, axis=None):
        neuron, cluster = divmod(int(pair), 4)
        if expected[neuron] < 0 and room[cluster]:
            expected[neuron], room[cluster] = cluster, room[cluster] - 1
    np.testing.assert_array_equal(_assign_balanced(distances), expected)


_assign_balanced = jax.jit(routing._assign_balanced)


def test_balanced_assignment_of_ties_and_non_finite_distances():
    for value in (0.0, np.inf, np.nan):
        assignment = _assign_balanced(jnp.full((24, 4), value))
        np.testing.assert_array_equal(np.bincount(assignment), 6)


def test_an_empty_cluster_keeps_its_centre():
    w = jnp.ones((8, 4))
    centroids, assignment = routing.cluster_neurons(w, 3, key=KEY, balanced=False, distance="l2")
    np.testing.assert_array_equal(assignment, 0)
    np.testing.assert_array_equal(centroids, 1)


def test_clusters_are_improved_until_nothing_moves():
    w = _random((60, 8))
    cluster = functools.partial(routing.cluster_neurons, w, 5, key=KEY, balanced=False, distance="l2")
    centroids, assignment = cluster(iterations=50)
    np.testing.assert_array_equal(routing.assign_tokens(w, centroids, "l2"), assignment)
    once, assignment = cluster(iterations=1)
    assert (routing.assign_tokens(w, once, "l2") != assignment).any()


def test_clusters_start_from_different_neurons_that_the_key_draws():
    w = _random((16, 8))

    def start(seed):
        options = dict(key=jax.random.key(seed), balanced=False, iterations=0, distance="l2")
        return np.asarray(routing.cluster_neurons(w, 16, **options)[0])

    for seed in range(2):
        np.testing.assert_array_equal(np.sort(start(seed)[:, 0]), np.sort(w[:, 0]))
    assert (start(0) != start(1)).any()


def test_layers_are_clustered_under_vmap():
    w, keys = _random((2, 24, 8)), jax.random.split(KEY, 2)

    @jax.jit
    def cluster(w, key):
        return routing.cluster_neurons(w, 4, key=key, balanced=True)[1]

    both = jax.vmap(cluster)(w, keys)
    for layer in range(2):
        np.testing.assert_array_equal(both[layer], cluster(w[layer], keys[layer]))


def test_what_cluster_neurons_refuses():
    with pytest.raises(ValueError, match="clusters = 5 must divide 24"):
        routing.cluster_neurons(jnp.ones((24, 8)), 5, key=KEY, balanced=True)
    with pytest.raises(ValueError, match="clusters = 25 must be at most 24"):
        routing.cluster_neurons(jnp.ones((24, 8)), 25, key=KEY, balanced=False)
    with pytest.raises(ValueError, match="distance = 'l1' must be one of l2, cosine"):
        routing.cluster_neurons(jnp.ones((24, 8)), 4, key=KEY, balanced=True, distance="l1")


# Tokens


@pytest.mark.parametrize("distance", ["l2", "cosine"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tokens_go_to_the_nearest_centre(distance, dtype):
    x, centroids = jnp.array(_random((50, 12)), dtype), 2 * _random((7, 12), seed=1)
    assignment = routing.assign_tokens(x, jnp.array(centroids), distance)
    expected = _distances(np.asarray(x, np.float64), centroids, distance).argmin(1)
    np.testing.assert_array_equal(assignment, expected)


def test_tokens_far_from_the_origin_go_to_the_nearest_centre():
    """What bfloat16 rounds off a centre is more than they differ by, if its length is that of before."""
    rng, common = np.random.default_rng(0), 16 * _random((256,), seed=2)
    x = jnp.array(common + 0.3 * rng.standard_normal((500, 256)), jnp.bfloat16)
    centroids = jnp.array(common + 0.3 * rng.standard_normal((16, 256)), jnp.float32)
    rounded = np.asarray(centroids.astype(jnp.bfloat16), np.float64)
    expected = _distances(np.asarray(x, np.float64), rounded, "l2").argmin(1)
    assert np.mean(routing.assign_tokens(x, centroids, "l2") == expected) > 0.98  # float32 decides near ties


def test_a_token_is_assigned_from_itself_alone():
    x, centroids = _random((32, 12)), _random((7, 12), seed=1)
    together = np.asarray(routing.assign_tokens(x, centroids, "cosine"))
    np.testing.assert_array_equal(routing.assign_tokens(x[::-1], centroids, "cosine"), together[::-1])
    np.testing.assert_array_equal(routing.assign_tokens(x[:5], centroids, "cosine"), together[:5])


def test_ties_and_nan_go_to_the_lowest_cluster():
    centroids = jnp.array([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    x = jnp.array([[0.0, 2.0], [jnp.nan, 5.0], [3.0, 0.0], [0.0, 0.0]])
    np.testing.assert_array_equal(routing.assign_tokens(x, centroids, "cosine"), [0, 0, 2, 0])
    np.testing.assert_array_equal(routing.assign_tokens(x, centroids, "l2"), [0, 0, 2, 0])


def test_expert_load_is_the_share_of_tokens():
    load = routing.expert_load(jnp.array([2, 0, 2, 2]), 4)
    np.testing.assert_array_equal(load, [0.25, 0, 0.75, 0])


# Rows


def _check_order(rows, tokens):
    """Every token has one slot, and knows it."""
    slots, position = np.asarray(rows.slots), np.asarray(rows.position)
    assert slots.dtype == position.dtype == np.int32
    np.testing.assert_array_equal(np.sort(slots[slots < tokens]), np.arange(tokens))
    np.testing.assert_array_equal(slots[position], np.arange(tokens))


def test_shuffled_rows_are_in_random_order():
    rows = routing.shuffle_rows(_order(100))
    _check_order(rows, 100)
    assert rows.slots.shape == (100,) and rows.block_clusters is None
    np.testing.assert_array_equal(rows.slots, _order(100))


def test_sorted_rows_are_by_cluster_and_random_within():
    assignment = np.random.default_rng(2).integers(5, size=200)
    rows = routing.sort_rows(jnp.array(assignment), 5, _order(200))
    _check_order(rows, 200)
    by_cluster = assignment[np.asarray(rows.slots)]
    assert (np.diff(by_cluster) >= 0).all()
    within = np.diff(np.asarray(rows.slots))[np.diff(by_cluster) == 0]
    assert 0.3 < (within > 0).mean() < 0.7
    in_order = np.asarray(routing.sort_rows(jnp.array(assignment), 5, None).slots)
    np.testing.assert_array_equal(in_order, np.argsort(assignment, kind="stable"))


_group_rows = jax.jit(lambda assignment, order: routing.group_rows(assignment, 5, 8, order))


def _order(tokens, seed=0):
    return jax.random.permutation(jax.random.key(seed), tokens)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.integers(0, 10**6), st.integers(1, 5))
def test_grouped_rows_give_every_block_one_cluster(seed, used):
    assignment = np.random.default_rng(seed).integers(used, size=61)
    rows = _group_rows(assignment, _order(61, seed))
    _check_order(rows, 61)
    assert rows.slots.shape == (96,)  # (61 + 5 * 7) // 8 * 8
    blocks = np.append(assignment, -1)[np.asarray(rows.slots)].reshape(12, 8)
    for block, cluster in zip(blocks, np.asarray(rows.block_clusters), strict=True):
        assert set(block) <= {cluster, -1} and 0 <= cluster < 5
    counts = np.bincount(assignment, minlength=5)
    assert (blocks >= 0).any(1).sum() == np.sum(-(-counts // 8))


def test_grouped_rows_are_random_within_a_cluster_or_in_order_without_a_key():
    assignment = jnp.array(np.random.default_rng(3).integers(3, size=90))
    shuffled, in_order = (
        jax.jit(lambda order: routing.group_rows(assignment, 3, 4, order))(order) for order in (_order(90), None)
    )
    _check_order(shuffled, 90)
    _check_order(in_order, 90)
    for cluster in range(3):
        members = np.flatnonzero(np.asarray(assignment) == cluster)
        positions = np.asarray(in_order.position)[members]
        np.testing.assert_array_equal(positions, positions[0] + np.arange(len(members)))
    assert (np.asarray(shuffled.slots) != np.asarray(in_order.slots)).any()


def test_rows_pass_through_vmap():
    assignment = jnp.array(np.random.default_rng(5).integers(5, size=(2, 61)))
    orders = jnp.stack([_order(61, seed) for seed in range(2)])
    both = jax.vmap(_group_rows)(assignment, orders)
    for layer in range(2):
        np.testing.assert_array_equal(both.slots[layer], _group_rows(assignment[layer], orders[layer]).slots)


# Neurons of a cluster


def test_neuron_sets_are_the_four_busiest_of_each_m():
    energy = np.random.default_rng(6).random((3, 32)).astype(np.float32)
    sets = np.asarray(jax.jit(lambda e: routing.neuron_sets(e, 8))(energy)).reshape(3, 4, 4)
    for cluster in range(3):
        for group in range(4):
            busiest = np.argsort(-energy[cluster, 8 * group : 8 * group + 8])[:4]
            np.testing.assert_array_equal(sets[cluster, group], 8 * group + np.sort(busiest))


def test_run_sets_are_the_busiest_runs_of_neighbours():
    energy = np.random.default_rng(7).random((3, 32)).astype(np.float32)
    sets = np.asarray(jax.jit(lambda e: routing.run_sets(e, 8, 4))(energy))
    for cluster in range(3):
        busiest = np.sort(np.argsort(-energy[cluster].reshape(8, 4).sum(1))[:4])
        np.testing.assert_array_equal(sets[cluster], (4 * busiest[:, None] + np.arange(4)).ravel())


def test_slices_share_out_the_neurons():
    np.testing.assert_array_equal(routing.slice_sets(12, 3), np.arange(12).reshape(3, 4))


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_the_neurons_have_as_many_of_each_set(parts):
    energy = np.random.default_rng(1).random((5, 128)).astype(np.float32)
    by_part = energy.reshape(5, parts, -1)
    alone = [routing.run_sets(by_part[:, part], 8, 4) + part * 128 // parts for part in range(parts)]
    np.testing.assert_array_equal(routing.run_sets(energy, 8, 4, parts), np.concatenate(alone, axis=1))


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_dealt_out_clusters_are_slices_of_every_part(parts):
    owner = np.random.default_rng(2).permutation(np.repeat(np.arange(3), 8))
    order = np.asarray(routing.deal_out(owner, 3, parts))
    assert sorted(order) == list(range(24))
    sets = np.asarray(routing.slice_sets(24, 3, parts))
    assert np.all(np.diff(sets) > 0)
    np.testing.assert_array_equal(owner[order[sets]], np.arange(3)[:, None].repeat(8, axis=1))
    np.testing.assert_array_equal(
        owner[order].reshape(parts, -1), np.tile(np.repeat(np.arange(3), 8 // parts), (parts, 1))
    )
