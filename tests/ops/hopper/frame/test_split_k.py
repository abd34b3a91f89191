import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops.hopper.frame import split_k


def _jobs_of_clusters(plan, in_use=None):
    """(row, column, first step, steps, contributes, parts) of each cluster's jobs; a tile's row is its number."""

    def of_cluster(cluster):
        count, job_at = plan.jobs(cluster, lambda tile: (tile, tile % 7), in_use)

        def fields(i):
            job = job_at(i)
            return jnp.stack([job.row, job.column, job.first_k, job.steps, job.contributes, job.parts])

        return count, jax.vmap(fields)(jnp.arange(plan.waves + 1))

    counts, jobs = jax.jit(jax.vmap(of_cluster))(jnp.arange(plan.clusters))
    return [of[:count] for count, of in zip(np.asarray(counts), np.asarray(jobs), strict=True)]


def _jobs(plan, in_use=None):
    """Returns those of all clusters."""
    return np.concatenate(_jobs_of_clusters(plan, in_use))


@pytest.mark.parametrize(
    "tiles, clusters, steps",
    [(10, 66, 32), (67, 66, 33), (67, 66, 66), (67, 66, 36), (632, 66, 32), (132, 66, 7), (5, 4, 64)],
)
def test_every_step_of_every_tile_is_done_once(tiles, clusters, steps):
    """Parts may go on past the last step, where there are only zeros."""
    plan = split_k.plan(tiles, clusters, steps)
    jobs = _jobs(plan)
    assert (jobs[:, 3] % 2 == plan.grid.odd).all()
    for tile in range(tiles):
        first, count, contributes, parts = jobs[jobs[:, 0] == tile][:, 2:].T
        np.testing.assert_array_equal(np.sort(first)[1:], np.sort(first + count)[:-1])
        assert first.min() == 0 and steps <= (first + count).max() < steps + count[0]
        np.testing.assert_array_equal(contributes, first > 0)
        np.testing.assert_array_equal(parts, np.where(first == 0, len(first) - 1, 0))


@pytest.mark.parametrize("tiles, clusters, steps", [(10, 66, 32), (67, 66, 66), (5, 4, 64)])
def test_parts_come_from_the_clusters_that_the_grid_says(tiles, clusters, steps):
    plan = split_k.plan(tiles, clusters, steps)
    work, grid = _jobs_of_clusters(plan), plan.grid
    last = {cluster: jobs[-1] for cluster, jobs in enumerate(work) if len(jobs) > plan.waves}
    assert sum(contributes for *_, contributes, _ in last.values()) == grid.contributors
    for cluster, (tile, _, first, count, contributes, parts) in last.items():
        assert not contributes or cluster < grid.contributors
        reached = first + count
        for part in range(1, parts + 1):
            other, _, other_first, other_count, other_contributes, _ = last[cluster - part * grid.contributor_stride]
            assert other_contributes and (other, other_first) == (tile, reached)
            reached += other_count


@pytest.mark.parametrize("steps, fewest", [(32, 2), (33, 1)])
def test_tiles_not_in_use_take_few_steps(steps, fewest):
    plan = split_k.plan(100, 66, steps)
    jobs = _jobs(plan, in_use=lambda row, column: (row < 90) & (column != 3))
    whole = _jobs(plan)
    idle = (jobs[:, 0] >= 90) | (jobs[:, 1] == 3)
    np.testing.assert_array_equal(jobs[~idle], whole[~idle])
    assert idle.any() and (jobs[idle, 3] == fewest).all()
    np.testing.assert_array_equal(np.delete(jobs, 3, axis=1), np.delete(whole, 3, axis=1))
