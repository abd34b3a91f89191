"""2:4 and V:2:M matrices: what is kept and how it is stored, in plain NumPy, NaN, inf, -0 and ties included."""

import functools
import itertools

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
from tests.recipes.masked_dense_ffn import venom_mask

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
    some, dense = np.array([67, 0, 13, 66, 30]), np.asarray(jitted.dense(sparse))  # in any order
    np.testing.assert_array_equal(sparse.take_columns(some), dense[:, some])
    np.testing.assert_array_equal(sparse.take_rows(some), dense[some])


def sparsify(x, method, axis=-1, *, scale=1.0, dtype=None):
    if method == "soft_threshold":
        return ops.soft_threshold_24(x, jnp.full(1, scale), axis, dtype=dtype)[0]
    return ops.sparsify_24(x, method, axis, dtype=dtype)


@pytest.mark.parametrize("method, scale", [("magnitude", 1.0), ("soft_threshold", 1.4826)])
@pytest.mark.parametrize("dtype, out", [(jnp.float32, None), (jnp.bfloat16, None), (jnp.float32, jnp.bfloat16)])
def test_groups_are_scaled_in_float32_and_rounded_once(dtype, out, method, scale):
    """A width that is no multiple of four counts as padded with zeros."""
    x = random((37, 54), dtype)
    expected, mask = numpy_sparse.sparsify_rows(x, method)
    sparse = jax.jit(functools.partial(sparsify, method=method, scale=scale, dtype=out))(x)
    np.testing.assert_array_equal(jitted.mask(sparse), mask)
    scaled = expected.astype(np.float32) * np.float32(scale)
    np.testing.assert_array_equal(jitted.dense(sparse), scaled.astype(out or dtype))


def draw_matrix(seed):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, (ROWS, COLUMNS), np.uint32).view(np.float32)
    return np.where(rng.random(bits.shape) < rng.random(), rng.choice(SPECIAL, bits.shape), bits)


def flush(x):
    """Replaces subnormal numbers by zeros, as arithmetic on the devices does."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)


@functools.partial(jax.jit, static_argnames="method")
def sparsify_both_ways(x, method):
    sparse, transposed = sparsify(x, method), sparsify(x.T, method, axis=0)
    return (sparse.to_dense(), transposed.to_dense()), (sparse.mask(), transposed.mask())


@cases(300)
@given(seed=seeds, method=st.sampled_from(METHODS))
def test_any_matrix_is_brought_to_the_format(seed, method):
    x = draw_matrix(seed)
    x, result = (x, np.asarray) if method == "magnitude" else (flush(x), flush)  # the one copies, the other subtracts
    with np.errstate(invalid="ignore", over="ignore"):
        expected, expected_mask = numpy_sparse.sparsify_rows(x, method)
        expected = result(expected.astype(np.float32))
    for dense, mask in zip(*sparsify_both_ways(x, method), strict=True):
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


def test_groups_of_tiles_whose_mask_has_more_than_two_are_nan():
    x = random((20, 24))
    mask = jitted.transposable_mask(x)
    mask = mask.at[4].set(True)  # full groups in row 4; a third in the second group of columns that had not kept it
    for form, kept in zip(jitted.sparsify_24_tiles(x, mask, dtype=jnp.float32), (mask, mask.T), strict=True):
        ones = np.asarray(kept).reshape(len(kept), -1, 4).sum(-1)
        assert (ones > 2).any() and (ones == 2).any()
        found, expected = np.asarray(form.values)[: len(kept), : kept.shape[1] // 2], np.repeat(ones > 2, 2, axis=1)
        np.testing.assert_array_equal(np.isnan(found), expected)


@pytest.mark.parametrize("axis", [-1, 0])
def test_soft_threshold_scale_of_weights_that_nothing_distinguishes(axis):
    """Else it is the least-squares fit, as tests/recipes/test_phase.py says."""
    assert jitted.soft_threshold_scale(jnp.ones((8, 8)), axis=axis) == 1.0


def tiles_of(x):
    """[M, N] to [M / 4, N / 4, 4, 4]."""
    return np.asarray(x).reshape(x.shape[0] // 4, 4, -1, 4).swapaxes(1, 2)


def best_energy(tile):
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
    for tile, kept in zip(tiles_of(magnitude).reshape(-1, 4, 4), tiles_of(mask).reshape(-1, 4, 4), strict=True):
        assert (kept.sum(0) == 2).all() and (kept.sum(1) == 2).all()
        assert tile[kept].sum() == pytest.approx(best_energy(tile), rel=1e-6)


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
