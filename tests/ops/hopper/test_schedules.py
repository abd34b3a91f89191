"""How clusters share out tiles and the steps along k, and which blocks list a slice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops.hopper.frame import split_k, stream_k
from sparse_lm.ops.row_order import inverted_index


def jobs_of(clusters, most, jobs):
    """Lists each cluster's jobs: rows of (tile, column, first step, steps, contributes, parts).

    Args:
      most: jobs that a cluster may have.
      jobs: a function of a cluster to the number of its jobs and the i-th.
    """

    def of_cluster(cluster):
        count, job_at = jobs(cluster)

        def fields(i):
            job = job_at(i)
            return jnp.stack([job.row, job.column, job.first_k, job.steps, job.contributes, job.parts])

        return count, jax.vmap(fields)(jnp.arange(most))

    counts, found = jax.jit(jax.vmap(of_cluster))(jnp.arange(clusters))
    return [of[:count] for count, of in zip(np.asarray(counts), np.asarray(found), strict=True)]


def check(work, grid, steps):
    """Every step of every tile is done once, and a tile's parts come from the clusters that the grid says.

    The last part may go on past the last of a tile's `steps`, where there are only zeros.
    """
    jobs = np.concatenate(work)
    assert (jobs[:, 3] > 0).all() and (jobs[:, 3] % 2 == grid.odd).all()
    for tile, last in enumerate(steps):
        first, count, contributes, parts = jobs[jobs[:, 0] == tile][:, 2:].T
        np.testing.assert_array_equal(np.sort(first)[1:], np.sort(first + count)[:-1])
        assert first.min() == 0 and last <= (first + count).max() < last + count.max()
        np.testing.assert_array_equal(contributes, first > 0)
        np.testing.assert_array_equal(parts, np.where(first == 0, len(first) - 1, 0))
    for cluster, own in enumerate(work):
        assert cluster < grid.contributors or not own[:, 4].any()
        for tile, _, first, count, _, parts in own:
            reached = first + count
            for part in range(1, parts + 1):
                others = work[cluster - part * grid.contributor_stride]
                ((other, _, other_first, other_count, *_),) = others[others[:, 4] == 1]
                assert (other, other_first) == (tile, reached)
                reached += other_count


def split_work(plan, in_use=None):
    return jobs_of(plan.clusters, plan.waves + 1, lambda c: plan.jobs(c, lambda tile: (tile, tile % 7), in_use))


@pytest.mark.parametrize("tiles, steps", [(10, 32), (67, 33), (67, 66), (632, 32), (132, 7)])
def test_tiles_that_are_left_over_are_split(tiles, steps):
    plan = split_k.plan(tiles, 66, steps)
    check(split_work(plan), plan.grid, [steps] * tiles)


@pytest.mark.parametrize("steps, fewest", [(32, 2), (33, 1)])
def test_tiles_not_in_use_take_few_steps(steps, fewest):
    plan = split_k.plan(100, 66, steps)
    jobs = np.concatenate(split_work(plan, in_use=lambda row, column: (row < 90) & (column != 3)))
    whole = np.concatenate(split_work(plan))
    idle = (jobs[:, 0] >= 90) | (jobs[:, 1] == 3)
    np.testing.assert_array_equal(jobs[~idle], whole[~idle])
    assert idle.any() and (jobs[idle, 3] == fewest).all()
    np.testing.assert_array_equal(np.delete(jobs, 3, axis=1), np.delete(whole, 3, axis=1))


def stream_work(clusters, pairs):
    pairs = jnp.asarray(pairs, jnp.int32)
    shares = jax.jit(stream_k.shares, static_argnums=0)(clusters, pairs)

    def jobs(cluster):
        return stream_k.jobs(clusters, shares, cluster, lambda tile: pairs[tile], lambda tile: (tile, tile))

    return jobs_of(clusters, len(pairs) + 1, jobs), stream_k.grid(clusters)


@pytest.mark.parametrize(
    "clusters, pairs",
    [
        (6, [32] * 9),
        (6, [90, 60, 60, 17, 17, 8, 8, 3, 3, 1, 1, 1, 1, 1]),
        (8, [200, 1, 1]),
        (5, [7, 8, 9, 10, 11, 12, 13, 4, 120] * 3),
        (1, [5, 5, 1, 1]),
    ],
)
def test_stretches_of_tiles_of_different_length(clusters, pairs):
    work, grid = stream_work(clusters, pairs)
    check(work, grid, [2 * count for count in pairs])


@pytest.mark.parametrize("order", [np.sort, np.random.default_rng(0).permutation])
def test_stretches_are_even(order):
    work, _ = stream_work(66, order(np.random.default_rng(1).integers(20, 200, size=256)))
    loads = [np.sum(own[:, 3] // 2 + 1) for own in work]
    assert max(loads) < 1.15 * np.mean(loads)
    assert not any(own[:, 4].any() for own in stream_work(66, [32] * 256)[0])  # of one size none is cut for little


def test_numbers_are_sorted_and_listings_inverted():
    entries, indices = stream_k.descending(jnp.array([3, 7, 0, 7, 9]))
    assert (entries.tolist(), indices.tolist()) == ([9, 7, 7, 3, 0], [4, 1, 3, 0, 2])
    lists = jnp.array([[4, 0], [1, 4], [0, 1], [6, 7]])  # the last one lists nothing that there is
    places, counts = inverted_index(lists, 6)
    expected = [[1, 4], [2, 5], [], [], [0, 3], []]
    assert places.tolist() == [row + [8] * (6 - len(row)) for row in expected]
    assert counts.tolist() == list(map(len, expected))
