import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import mvue
from tests.ops import jitted

DRAWS = 10_000


def _estimate(x, key):
    return jitted.sparsify_24(x, "mvue", key=key)


def _moments(x, axis=-1):
    """Mean and variance, float64 [M, K], of many estimates of x."""
    estimate = jax.vmap(lambda key: ops.sparsify_24(x, "mvue", axis, key=key).to_dense())

    @jax.jit
    def add(sums, key):
        dense = estimate(jax.random.split(key, 500))
        dense = dense.mT if axis == 0 else dense
        return (sums[0] + dense.sum(0), sums[1] + jnp.square(dense).sum(0)), None

    zeros = jnp.zeros(x.shape)
    keys = jax.random.split(jax.random.key(1), DRAWS // 500)
    (total, squares), _ = jax.lax.scan(add, (zeros, zeros), keys)
    mean = np.asarray(total, np.float64) / DRAWS
    return mean, np.maximum(np.asarray(squares, np.float64) / DRAWS - mean**2, 0)


@pytest.mark.parametrize("axis", [-1, 0])
def test_estimate_is_unbiased(axis):
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    x[0, :4] = [10, 0.1, -0.01, 0]  # one member dominates
    x[1, :4] = [0, 3, 0, 0]
    mean, variance = _moments(jnp.array(x), axis)
    z = (mean - x) / np.sqrt(variance / DRAWS + np.square(1e-5 * x) + 1e-20)  # the mean is of float32 sums
    assert np.abs(z).max() < 4.5
    assert 0.7 < np.sqrt(np.mean(z[2:] ** 2)) < 1.3


def test_relative_variance_on_gaussians_is_half():
    x = jax.random.normal(jax.random.key(2), (512, 512))
    estimate = jitted.dense(_estimate(x, jax.random.key(3)))
    relative = jnp.sum(jnp.square(estimate - x)) / jnp.sum(jnp.square(x))
    assert relative == pytest.approx(0.50, abs=0.02)


def test_two_different_members_are_drawn_and_others_are_zero():
    x = jax.random.normal(jax.random.key(4), (64, 64), jnp.bfloat16)
    sparse = _estimate(x, jax.random.key(5))
    np.testing.assert_array_equal(np.asarray(jitted.mask(sparse)).reshape(64, 16, 4).sum(-1), 2)
    assert (np.asarray(sparse.values) != 0).all()
    again, other = (_estimate(x, jax.random.key(seed)) for seed in (5, 6))
    np.testing.assert_array_equal(sparse.metadata, again.metadata)
    assert (np.asarray(sparse.metadata) != np.asarray(other.metadata)).any()


def test_a_tiny_group_is_estimated_like_a_large_one():
    x = jax.random.normal(jax.random.key(6), (8, 64))
    large, tiny = (_estimate(scale * x, jax.random.key(7)) for scale in (1.0, 2.0**-80))
    np.testing.assert_array_equal(large.metadata, tiny.metadata)
    np.testing.assert_array_equal(large.values, 2.0**80 * tiny.values)


def test_probabilities_are_those_of_two_draws_without_replacement():
    weights = np.array([0.5, 1.0, 0.05, 2.0])
    expected = np.zeros(4)
    for i, j in itertools.permutations(range(4), 2):
        expected[[i, j]] += weights[i] / weights.sum() * weights[j] / (weights.sum() - weights[i])
    members = [jnp.full((1,), w, jnp.float32) for w in weights]
    _, _, estimates = mvue.sample_two(members, jax.random.key(0))
    np.testing.assert_allclose(np.concatenate(estimates), weights / expected, rtol=1e-4)
