import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import mvue
from tests.ops import jitted

DRAWS = 10_000
estimate = functools.partial(jitted.sparsify_24, method="mvue")


@pytest.mark.parametrize("axis", [-1, 0])
def test_random_numbers_reach_neither_end_and_are_each_groups_own(axis):
    numbers = np.asarray(mvue.uniform_of_groups(jax.random.key(0), (1024, 1024), axis))
    assert 0 < numbers.min() < 2**-16 and 1 - 2**-16 < numbers.max() < 1
    for neighbours in (np.roll(numbers, 1, axis) for axis in (0, 1)):
        assert abs(np.corrcoef(numbers.ravel(), neighbours.ravel())[0, 1]) < 0.01


@pytest.mark.parametrize("axis", [-1, 0])
def test_estimate_is_unbiased(axis):
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    x[0, :4] = [10, 0.1, -0.01, 0]  # one member dominates
    x[1, :4] = [0, 3, 0, 0]
    draw = lambda key: ops.sparsify_24(jnp.array(x), "mvue", axis, key=key).to_dense()  # noqa: E731
    drawn = jax.jit(lambda keys: jax.lax.map(draw, keys, batch_size=500))(jax.random.split(jax.random.key(1), DRAWS))
    drawn = np.asarray(drawn if axis == -1 else drawn.mT, np.float64)
    z = (drawn.mean(0) - x) / np.sqrt(drawn.var(0) / DRAWS + np.square(1e-5 * x) + 1e-20)
    assert np.abs(z).max() < 4.5
    assert 0.7 < np.sqrt(np.mean(z[2:] ** 2)) < 1.3


def _optimal_probabilities(groups):
    """Returns probabilities in proportion to the magnitudes [..., 4], at most 1, two in sum."""
    sizes = np.sort(np.abs(groups), axis=-1)
    surely = sizes[..., 3] > sizes[..., :3].sum(-1)
    scale = np.where(surely, 1 / sizes[..., :3].sum(-1), 2 / sizes.sum(-1))
    return np.minimum(np.abs(groups) * scale[..., None], 1)


def test_keys_draw_different_members_of_tiny_groups_as_of_large_ones():
    x = jax.random.normal(jax.random.key(6), (8, 64))
    large, other, tiny = (estimate(size * x, key=jax.random.key(k)) for size, k in ((1.0, 7), (1.0, 8), (2.0**-80, 7)))
    np.testing.assert_array_equal(np.asarray(jitted.mask(large)).reshape(-1, 4).sum(-1), 2)
    assert (np.asarray(large.metadata) != np.asarray(other.metadata)).any()
    np.testing.assert_array_equal(large.metadata, tiny.metadata)
    np.testing.assert_array_equal(large.values, 2.0**80 * tiny.values)


@pytest.mark.parametrize("group, value", [([0, 0, -0.0, 0], 0), ([np.nan, 0, 0, 0], np.nan)])
def test_groups_without_a_draw(group, value):
    sparse = estimate(jnp.array([group], jnp.float32), key=jax.random.key(0))
    assert np.flatnonzero(jitted.mask(sparse)[0]).tolist() == [0, 1]
    np.testing.assert_array_equal(sparse.values[0, :2], value)


@pytest.mark.parametrize("place", range(4))
def test_an_infinite_member_is_kept(place):
    groups = np.insert(np.array([1, -2, 3], np.float32), place, -np.inf)[None].repeat(64, axis=0)
    dense = np.asarray(estimate(jnp.asarray(groups), key=jax.random.key(0)).to_dense())
    assert (dense[:, place] == -np.inf).all()
    np.testing.assert_array_equal(np.abs(np.delete(dense, place, axis=1)).sum(axis=1), 6)


# One is larger than the others together, and rounding puts both points on it: still it is not drawn twice.
SMALL, LARGE = 2**-17 * (1 - 2**-20), [2.0, 1 - 2**-17]
GROUPS = [[0.5, -1.0, 0.05, 2.0], [-1.0, 1.5, 2.0, 0.7], [3.0, 3.0, -3.0, 3.0], [0, 1, -1, 1]]


@pytest.mark.parametrize("group", [*GROUPS, [SMALL, *LARGE, 0.0], [0.0, SMALL, *LARGE]])
def test_members_are_drawn_with_the_probabilities_of_least_variance(group):
    """Over all random numbers that there are."""
    uniform = (jnp.arange(2**16) + 0.5) / 2**16
    members = [jnp.full(uniform.shape, member, jnp.float32) for member in group]
    first, second, estimates = jax.jit(mvue.sample_two)(members, uniform)
    assert (np.asarray(first) < np.asarray(second)).all()
    drawn = np.stack([(np.asarray(first) == i) | (np.asarray(second) == i) for i in range(4)])
    np.testing.assert_allclose(drawn.mean(1), _optimal_probabilities(np.array(group)), atol=2**-16)
    kept = np.where(drawn, np.stack(estimates), 0).astype(np.float64)
    half = min(np.abs(group).sum() / 2, np.abs(group).sum() - np.abs(group).max())
    np.testing.assert_allclose(kept.mean(1), group, atol=2**-16 * half * (1 + 1e-6))


@pytest.mark.parametrize("axis", [-1, 0])
def test_at_most_two_of_a_group_are_kept_as_they_are(axis):
    rng = np.random.default_rng(8)
    x = rng.normal(size=(16, 64)).astype(np.float32) * 10.0 ** rng.integers(-8, 8, (16, 64))
    kept = np.argsort(rng.random((256, 4)), axis=-1) < rng.integers(0, 3, (256, 1))
    x = np.where(kept.reshape(x.shape), x, 0).astype(np.float32)
    dense = jax.jit(jax.vmap(lambda x, key: ops.sparsify_24(x, "mvue", axis, key=key).to_dense(), (None, 0)))
    x = x if axis == -1 else x.T
    for found in np.asarray(dense(x, jax.random.split(jax.random.key(9), 50))):
        np.testing.assert_array_equal(found if axis == -1 else found.T, x)
