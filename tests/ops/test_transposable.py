import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from tests.ops import jitted


def _tiles(x):
    """[M, N] to [M / 4, N / 4, 4, 4]."""
    return np.asarray(x).reshape(x.shape[0] // 4, 4, -1, 4).swapaxes(1, 2)


def _best_energy(tile):
    """Largest sum over all ways to take two of each row, and of each column, of a 4 x 4 tile."""
    best = 0.0
    for pairs in itertools.product(itertools.combinations(range(4), 2), repeat=4):
        if np.bincount(np.concatenate(pairs), minlength=4).tolist() == [2, 2, 2, 2]:
            best = max(best, sum(tile[row, list(pair)].sum() for row, pair in enumerate(pairs)))
    return best


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_mask_keeps_the_best_pattern_of_each_tile(dtype):
    x = jnp.array(np.random.default_rng(0).normal(size=(16, 24)), dtype)
    mask = jitted.transposable_mask(x)
    magnitude = np.abs(np.asarray(x, np.float64))
    for tile, kept in zip(_tiles(magnitude).reshape(-1, 4, 4), _tiles(mask).reshape(-1, 4, 4), strict=True):
        assert (kept.sum(0) == 2).all() and (kept.sum(1) == 2).all()
        assert tile[kept].sum() == pytest.approx(_best_energy(tile), rel=1e-6)


def test_ragged_edges_count_as_padded_with_zeros_and_ties_take_the_lowest_pattern():
    x = jax.random.normal(jax.random.key(1), (10, 7))
    padded = jitted.transposable_mask(jnp.pad(x, ((0, 2), (0, 1))))
    np.testing.assert_array_equal(jitted.transposable_mask(x), padded[:10, :7])
    np.testing.assert_array_equal(jitted.transposable_mask(jnp.full((4, 4), 3.0)), ops.TRANSPOSABLE_PATTERNS[0])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38])
def test_huge_and_non_finite_values_are_kept_in_a_valid_mask(value):
    x = np.random.default_rng(2).normal(size=(4, 4)).astype(np.float32)
    x[1, 2] = x[3, 0] = x[2, 3] = value
    mask = np.asarray(jitted.transposable_mask(jnp.array(x)))
    assert (mask.sum(0) == 2).all() and (mask.sum(1) == 2).all()
    assert mask[1, 2] and mask[3, 0] and mask[2, 3]
