"""Compressed formats of any bits: read as their description says, in plain NumPy, NaN, inf and -0 included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparse_lm import ops
from sparse_lm.ops import formats
from sparse_lm.ops.compress import compress_24
from tests.fuzz.cases import cases
from tests.ops import numpy_sparse

ROWS, COLUMNS = 3, 12  # one shape, so that each function compiles once
TILE = (64, 64)
PAIRS = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], np.uint32)
seeds = st.integers(0, 2**32 - 1)

# Few values of many kinds tie often; zeros of both signs, subnormals and the largest are among them.
SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3.4e38, 1e-30], np.float32)


def draw_matrix(seed, shape=(ROWS, COLUMNS)):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
    return np.where(rng.random(shape) < rng.random(), rng.choice(SPECIAL, shape), bits)


def draw_tile(seed):
    """Values [64, 32] and positions first < second [64, 16] of one metadata tile."""
    rng = np.random.default_rng(seed)
    pairs = PAIRS[rng.integers(6, size=(64, 16))]
    return draw_matrix(seed, (64, 32)), pairs[..., 0], pairs[..., 1]


def scatter(values, first, second):
    """[M, K / 2] values to [M, K], position by position."""
    dense = np.zeros((values.shape[0], 2 * values.shape[1]), values.dtype)
    rows, groups = np.indices(first.shape)
    dense[rows, 4 * groups + first] = values[:, 0::2]
    dense[rows, 4 * groups + second] = values[:, 1::2]
    return dense


def flush(x):
    """With zeros for subnormal numbers, as arithmetic gives them on the devices."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)


def assert_same_bits(actual, expected):
    """But for the bits of NaN, which no operation keeps."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    same = (actual.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(actual) & np.isnan(expected))
    assert same.all()


def word_of(row, group):
    """(lane, first bit) of a group's four bits in a metadata tile: the layout in the format's docstring."""
    warp, within = divmod(row, 16)
    half, g = divmod(within, 8)
    t, position = divmod(group, 4)
    return 32 * warp + 4 * g + t, 16 * half + 4 * position


WORDS = np.array([word_of(row, group) for row in range(64) for group in range(16)])
LANES, BITS = WORDS[:, 0], WORDS[:, 1]


@functools.partial(jax.jit, static_argnames="shape")
def read_24(values, metadata, shape):
    sparse = formats.Sparse24(values, metadata, shape)
    return sparse.to_dense(), sparse.mask(), sparse.take(jnp.arange(shape[1])[::-1])


@cases(400)
@given(seed=seeds, rows=st.sampled_from([64, 61]), columns=st.sampled_from([64, 37]))
def test_a_tile_is_read_where_its_metadata_says(seed, rows, columns):
    values, first, second = draw_tile(seed)
    words = np.zeros(128, np.uint32)
    np.bitwise_or.at(words, LANES, (first | second << 2).ravel() << BITS)
    metadata = words.view(np.int32).reshape(1, 1, 128)
    dense, mask, backwards = read_24(values, metadata, (rows, columns))
    expected = scatter(values, first, second)[:rows, :columns]
    assert_same_bits(dense, expected)
    np.testing.assert_array_equal(mask, scatter(np.ones_like(values, bool), first, second)[:rows, :columns])
    assert_same_bits(backwards, expected[:, ::-1])


@functools.partial(jax.jit, static_argnames="method")
def sparsify(x, method):
    sparse = ops.sparsify_24(x, method)
    transposed = ops.sparsify_24(x.T, method, axis=0)
    return sparse.to_dense(), sparse.mask(), transposed.to_dense(), transposed.mask()


@cases(300)
@given(seed=seeds, method=st.sampled_from(["magnitude", "soft_threshold"]))
def test_any_matrix_is_brought_to_the_format(seed, method):
    x = draw_matrix(seed)
    x, result = (x, np.asarray) if method == "magnitude" else (flush(x), flush)  # the one copies, the other subtracts
    with np.errstate(invalid="ignore", over="ignore"):
        expected, expected_mask = numpy_sparse.sparsify_rows(x, method)
        expected = expected.astype(np.float32)
    dense, mask, *transposed = sparsify(x, method)
    np.testing.assert_array_equal(mask, expected_mask)
    assert_same_bits(result(dense), result(expected))
    assert_same_bits(result(transposed[0]), result(expected))
    np.testing.assert_array_equal(transposed[1], expected_mask)


@jax.jit
def compress(x, mask):
    return [compress_24(x, mask).to_dense(), compress_24(x.T, mask.T, axis=0).to_dense(), compress_24(x, mask).mask()]


@cases(300)
@given(seed=seeds)
def test_any_mask_of_at_most_two_in_four_is_kept(seed):
    rng = np.random.default_rng(seed)
    x = draw_matrix(seed)
    order = rng.random((ROWS, COLUMNS // 4, 4)).argsort(axis=-1)
    mask = (order < rng.integers(0, 3, (ROWS, COLUMNS // 4, 1))).reshape(ROWS, COLUMNS)
    dense, transposed, stored = compress(x, mask)
    expected = np.where(mask, x, np.float32(0))
    assert_same_bits(dense, expected)
    assert_same_bits(transposed, expected)
    assert (np.asarray(stored) >= mask).all()
    assert (np.asarray(stored).reshape(ROWS, -1, 4).sum(-1) == 2).all()
