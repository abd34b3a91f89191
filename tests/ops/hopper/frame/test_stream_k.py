import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops.hopper.frame.stream_k import StreamK, descending


def _work(stream, pairs):
    """Each cluster's jobs, (tile, first pair, pairs, contributes, parts), read from the shares as a kernel does."""
    shares = np.asarray(jax.jit(stream.shares)(pairs))
    work = []
    for cluster in range(stream.clusters):
        count, job_at = stream.jobs(shares, jnp.int32(cluster), lambda tile: pairs[tile], lambda tile: (tile, tile))
        jobs = [job_at(jnp.int32(i)) for i in range(int(count))]
        fields = [(job.row, job.first_k // 2, job.steps // 2, job.contributes, job.parts) for job in jobs]
        work.append([tuple(map(int, job)) for job in fields])
    return work


@pytest.mark.parametrize(
    "clusters, pairs",
    [
        (6, [32] * 6),
        (6, [32] * 9),
        (6, [90, 60, 60, 17, 17, 8, 8, 3, 3, 1, 1, 1, 1, 1]),
        (6, [1] * 10),
        (8, [200, 1, 1]),
        (5, [7, 8, 9, 10, 11, 12, 13, 4, 120] * 3),
        (1, [5, 5, 1, 1]),
    ],
)
def test_every_pair_of_steps_is_done_once_and_summed(clusters, pairs):
    stream, pairs = StreamK(clusters), np.asarray(pairs, np.int32)
    assert not stream.grid.odd
    work = _work(stream, pairs)
    done = [np.zeros(count, int) for count in pairs]
    finished = np.zeros(len(done), int)
    for cluster, jobs in enumerate(work):
        for tile, first, count, contributes, parts in jobs:
            assert count > 0
            done[tile][first : first + count] += 1
            finished[tile] += not contributes
            assert contributes == (first > 0)
            assert not contributes or (cluster < stream.grid.contributors and parts == 0)
            reached = first + count
            for part in range(1, parts + 1):
                contributions = [job for job in work[cluster - part * stream.grid.contributor_stride] if job[3]]
                ((other, other_first, other_count, *_),) = contributions
                assert (other, other_first) == (tile, reached)
                reached += other_count
            assert contributes or reached == len(done[tile])
    assert all((pairs_done == 1).all() for pairs_done in done) and (finished == 1).all()


@pytest.mark.parametrize("tiles, order", [(60, np.flip), (256, np.sort), (256, np.random.default_rng(0).permutation)])
def test_shares_are_even(tiles, order):
    pairs = order(np.random.default_rng(1).integers(20, 200, size=tiles)).astype(np.int32)
    loads = [sum(job[2] + 1 for job in jobs) for jobs in _work(StreamK(66), pairs)]
    assert max(loads) < 1.15 * np.mean(loads)


def test_tiles_of_one_size_are_not_cut_for_little():
    assert not any(job[3] for jobs in _work(StreamK(66), np.full(256, 32, np.int32)) for job in jobs)


def test_descending():
    entries, indices = descending(jnp.array([3, 7, 0, 7, 9]))
    np.testing.assert_array_equal(entries, [9, 7, 7, 3, 0])
    np.testing.assert_array_equal(indices, [4, 1, 3, 0, 2])
