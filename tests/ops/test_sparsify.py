"""2:4 matrices: what is kept and how it is stored, in plain NumPy, NaN, inf, -0 and ties included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_lm import ops
from tests.fuzz.cases import cases
from tests.ops import jitted, numpy_sparse
from tests.ops.operands import assert_same_bits, random

METHODS = ["magnitude", "soft_threshold"]
ROWS, COLUMNS = 3, 12  # one shape, so that each function compiles once
seeds = st.integers(0, 2**32 - 1)
# Few values of many kinds tie often; zeros of both signs, subnormals and the largest are among them.
SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3.4e38, 1e-30], np.float32)


@pytest.mark.parametrize("shape", [(128, 192), (70, 68)])
def test_values_and_metadata_are_laid_out_as_described(shape):
    """Padding is zeros, at the lowest positions."""
    x = random(shape)
    sparse = jitted.sparsify_24(x, "magnitude")
    values, metadata = numpy_sparse.compress(*numpy_sparse.sparsify_rows(numpy_sparse.pad(np.asarray(x)), "magnitude"))
    np.testing.assert_array_equal(sparse.values, values)
    np.testing.assert_array_equal(np.asarray(sparse.metadata).view(np.uint32), metadata)
    assert sparse.metadata.dtype == jnp.int32


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype, out", [(jnp.float32, None), (jnp.bfloat16, None), (jnp.float32, jnp.bfloat16)])
def test_groups_are_scaled_in_float32_and_rounded_once(dtype, out, method):
    """A width that is no multiple of four counts as padded with zeros."""
    x, scale = random((37, 54), dtype), np.float32(1.4826)
    expected, mask = numpy_sparse.sparsify_rows(x, method)
    sparse = jitted.sparsify_24(x, method, scale=scale, dtype=out)
    np.testing.assert_array_equal(jitted.mask(sparse), mask)
    np.testing.assert_array_equal(jitted.dense(sparse), (expected.astype(np.float32) * scale).astype(out or dtype))


def draw_matrix(seed):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, (ROWS, COLUMNS), np.uint32).view(np.float32)
    return np.where(rng.random(bits.shape) < rng.random(), rng.choice(SPECIAL, bits.shape), bits)


def flush(x):
    """Replaces subnormal numbers by zeros, as arithmetic on the devices does."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)


@functools.partial(jax.jit, static_argnames="method")
def sparsify(x, method):
    sparse, transposed = ops.sparsify_24(x, method), ops.sparsify_24(x.T, method, axis=0)
    return (sparse.to_dense(), transposed.to_dense()), (sparse.mask(), transposed.mask())


@cases(300)
@given(seed=seeds, method=st.sampled_from(METHODS))
def test_any_matrix_is_brought_to_the_format(seed, method):
    x = draw_matrix(seed)
    x, result = (x, np.asarray) if method == "magnitude" else (flush(x), flush)  # the one copies, the other subtracts
    with np.errstate(invalid="ignore", over="ignore"):
        expected, expected_mask = numpy_sparse.sparsify_rows(x, method)
        expected = result(expected.astype(np.float32))
    for dense, mask in zip(*sparsify(x, method), strict=True):
        np.testing.assert_array_equal(mask, expected_mask)
        assert_same_bits(result(dense), expected)


@jax.jit
def compress(x, mask):
    sparse, transposed = ops.compress_24(x, mask), ops.compress_24(x.T, mask.T, axis=0)
    return (sparse.to_dense(), transposed.to_dense()), sparse.mask()


@cases(300)
@given(seed=seeds)
def test_any_mask_of_at_most_two_in_four_is_kept(seed):
    rng, x = np.random.default_rng(seed), draw_matrix(seed)
    order = rng.random((ROWS, COLUMNS // 4, 4)).argsort(axis=-1)
    mask = (order < rng.integers(0, 3, (ROWS, COLUMNS // 4, 1))).reshape(ROWS, COLUMNS)
    both, stored = compress(x, mask)
    for dense in both:
        assert_same_bits(dense, np.where(mask, x, np.float32(0)))
    assert (np.asarray(stored) >= mask).all() and (np.asarray(stored).reshape(ROWS, -1, 4).sum(-1) == 2).all()


@pytest.mark.parametrize("shape", [(64, 64), (33, 46)])
def test_tiles_are_24_both_ways_from_one_selection(shape):
    x = random(shape, jnp.bfloat16)
    mask = jitted.transposable_mask(x)
    rows, columns = jitted.sparsify_24_tiles(x, mask, dtype=jnp.float32)
    expected = jnp.where(mask, x, 0)
    np.testing.assert_array_equal(jitted.dense(rows), expected)
    np.testing.assert_array_equal(jitted.dense(columns), expected.T)
    assert rows.dtype == columns.dtype == jnp.float32


@pytest.mark.parametrize("axis", [-1, 0])
def test_soft_threshold_scale(axis):
    """It is the least-squares fit, as tests/recipes/test_phase.py says."""
    assert jitted.soft_threshold_scale(random((512, 512)), axis=axis) == pytest.approx(1.48, abs=0.01)  # 2409.09099
    assert jitted.soft_threshold_scale(jnp.ones((8, 8)), axis=axis) == 1.0
