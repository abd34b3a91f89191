"""Column choice, condensing and compression of V:2:M matrices."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from tests.ops import jitted
from tests.ops.operands import random
from tests.recipes.masked_dense_ffn import venom_mask


def test_columns_of_zeros_ties_and_non_finite_values():
    zeros = jnp.zeros((8, 8))
    np.testing.assert_array_equal(jitted.venom_columns(zeros, 8, 8), [[0, 1, 2, 3]])
    ones = jnp.ones((8, 16))
    np.testing.assert_array_equal(jitted.venom_columns(ones, 8, 8), [[0, 1, 2, 3, 8, 9, 10, 11]])
    spoilt = zeros.at[0, 7].set(jnp.nan).at[3, 6].set(-jnp.inf)
    np.testing.assert_array_equal(jitted.venom_columns(spoilt, 8, 8), [[0, 1, 6, 7]])


@pytest.mark.parametrize("shape, v, m", [((37, 60), 16, 12), ((150, 64), 4, 4)])
def test_sparsify_venom_keeps_two_of_the_four_columns_of_largest_norm(shape, v, m):
    x = random(shape, jnp.bfloat16, seed=3)
    sparse = jitted.sparsify_venom(x, v, m)
    exact = np.asarray(x, np.float64)
    np.testing.assert_array_equal(np.asarray(jitted.dense(sparse), np.float64), exact * venom_mask(exact, v, m))
    assert sparse.dtype == jnp.bfloat16 and (sparse.v, sparse.m, sparse.shape) == (v, m, shape)
    assert np.asarray(jitted.mask(sparse)).sum() == shape[0] * shape[1] * 2 // m


def test_condense_reads_the_columns_of_each_block():
    x = np.random.default_rng(5).normal(size=(10, 6)).astype(np.float32)
    columns = np.array([[5, 0, 2], [1, 1, 6], [3, 4, 6]], np.int32)  # 6 is one past the last: zeros
    condensed = np.asarray(jitted.condense(jnp.array(x), jnp.array(columns), 4))
    padded = np.pad(x, ((0, 0), (0, 1)))
    for row in range(10):
        np.testing.assert_array_equal(condensed[row], padded[row, columns[row // 4]])


def test_rows_blocks_and_columns_are_padded():
    sparse = jitted.sparsify_venom(random((40, 48), seed=3), v=16, m=8)
    assert sparse.values.shape == (64, 32) and sparse.metadata.shape == (1, 1, 128)
    columns = np.asarray(sparse.columns)
    assert columns.shape == (4, 64)
    assert (columns[:3, :24] < 48).all() and (columns[3] == 48).all() and (columns[:, 24:] == 48).all()
    assert sparse.condensed().shape == (40, 24)
    condensed, columns = jitted.sparsify_24(random((8, 8)), "magnitude"), jnp.arange(8, dtype=jnp.int32)[None]
    taller_than_a_tile = ops.to_venom(condensed, columns, 16, 128, 8, contiguous=4)
    assert taller_than_a_tile.values.shape == (128, 32) and taller_than_a_tile.columns.shape == (1, 64)
    assert taller_than_a_tile.contiguous == 4
    np.testing.assert_array_equal(np.asarray(taller_than_a_tile.metadata)[1].view(np.uint32), 0x44444444)
