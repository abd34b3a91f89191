"""Random operands and what the products of them must be."""

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lm.ops.formats import Sparse24, SparseVenom, pack_metadata
from sparse_lm.ops.row_order import RowOrder

PAIRS = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 3.0]


def random(shape, dtype=jnp.float32, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


def random_or_special(shape, dtype, seed, special=False, scale=3.0):
    """Normal numbers, or a mixture of special ones, with many ties, that fills every kind of group."""
    if special:
        return jnp.asarray(np.random.default_rng(seed).choice(SPECIAL, size=shape), dtype)
    return random(shape, dtype, seed, scale)


def integers_and_special(special, dtype):
    """[256, 512]: integers, one in 50 of them replaced, and all of the first 128 rows."""
    rng = np.random.default_rng(9)
    x = np.where(rng.random((256, 512)) < 0.02, special, rng.integers(-8, 9, (256, 512)))
    return jnp.asarray(np.where(np.arange(256)[:, None] < 128, special, x), dtype)


def random_24(m, k, dtype, seed, pairs=PAIRS, scale=1.0) -> Sparse24:
    """[M, K] whose groups keep one of `pairs`; padding is as the format asks for."""
    rows, columns = -(-m // 64) * 64, -(-k // 64) * 64
    rng = np.random.default_rng(seed)
    kept = np.asarray(pairs)[rng.integers(len(pairs), size=(rows, columns // 4))]
    position = 4 * np.arange(columns // 4)[:, None] + kept
    inside = (position < k) & (np.arange(rows) < m)[:, None, None]
    values = np.where(inside, rng.normal(size=kept.shape) * scale, 0.0).reshape(rows, columns // 2)
    kept = np.where(inside.any(axis=(-1), keepdims=True), kept, [0, 1])
    metadata = pack_metadata(jnp.asarray(kept[..., 0]), jnp.asarray(kept[..., 1]))
    return Sparse24(jnp.asarray(values, dtype), metadata, (m, k))


def random_venom(m_rows, k, v, m, dtype, seed) -> SparseVenom:
    """[m_rows, K] in V:2:M form, with columns and positions at random."""
    rng = np.random.default_rng(seed)
    blocks, groups = -(-m_rows // v), k // m
    chosen = np.sort(np.argsort(rng.random((blocks, groups, m)), axis=-1)[..., :4], axis=-1)
    columns = (chosen + m * np.arange(groups)[:, None]).reshape(blocks, 4 * groups)
    condensed = random_24(m_rows, 4 * groups, dtype, seed + 1)
    missing_rows = blocks * v - condensed.values.shape[0]
    missing_columns = 2 * condensed.values.shape[1] - 4 * groups
    empty = 0x44444444  # positions (0, 1) in every group
    return SparseVenom(
        values=jnp.pad(condensed.values, ((0, missing_rows), (0, 0))),
        metadata=jnp.pad(condensed.metadata, ((0, missing_rows // 64), (0, 0), (0, 0)), constant_values=empty),
        columns=jnp.asarray(np.pad(columns, ((0, 0), (0, missing_columns)), constant_values=k), jnp.int32),
        shape=(m_rows, k),
        v=v,
        m=m,
    )


def random_contiguous(blocks, kept, contiguous, rows, seed, lists=3):
    """int32 [blocks, kept]: slices of rows, one of a few lists for each block, as blocks of a cluster have."""
    rng = np.random.default_rng(seed)
    lists = np.stack([rng.permutation(rows // contiguous)[: kept // contiguous] for _ in range(lists)])
    starts = contiguous * lists[np.sort(rng.integers(len(lists), size=blocks))]
    return jnp.asarray((starts[:, :, None] + np.arange(contiguous)).reshape(blocks, kept), jnp.int32)


def random_columns(blocks, kept, neurons, seed):
    """int32 [blocks, kept]: distinct neurons of each block in any order; `neurons`, a row of zeros, among them."""
    rng = np.random.default_rng(seed)
    return jnp.asarray([rng.permutation(neurons + 1)[:kept] for _ in range(blocks)], jnp.int32)


def random_venom_contiguous(m_rows, k, kept, v, contiguous, dtype, seed) -> SparseVenom:
    """[m_rows, K] that keeps `kept` columns, contiguous, at random positions."""
    rows = -(-m_rows // v) * v
    condensed = random_24(rows, kept, dtype, seed)
    columns = random_contiguous(rows // v, kept, contiguous, k, seed + 1)
    return SparseVenom(condensed.values, condensed.metadata, columns, (m_rows, k), v, 4 * k // kept, contiguous)


def random_rows(tokens, slots, seed) -> RowOrder:
    """An order of tokens in which the slots that are padding lie anywhere."""
    rng = np.random.default_rng(seed)
    position = rng.permutation(slots)[:tokens]
    token = np.full(slots, tokens)
    token[position] = np.arange(tokens)
    return RowOrder(jnp.asarray(token, jnp.int32), jnp.asarray(position, jnp.int32))


def exact_stats(h, kept):
    """`HiddenStats` of Y as it is rounded; XLA may leave that rounding out of its sums."""
    y = np.asarray(jnp.asarray(np.square(np.maximum(np.asarray(h, np.float32), 0)), h.dtype), np.float64)
    return np.count_nonzero(y), np.square(y).sum(), np.square(np.asarray(kept, np.float64)).sum()


def assert_as_good_as_reference(result, reference, exact):
    """The error against `exact` is at most 1.5 times the reference's, plus float32's own rounding."""
    exact = np.asarray(exact, np.float32)

    def error(x):
        return float(np.linalg.norm(np.asarray(x, np.float32) - exact) / np.linalg.norm(exact))

    assert result.dtype == reference.dtype
    assert error(result) <= 1.5 * error(reference) + 1e-6


def assert_repeats(function, *args):
    """Two runs of a compiled function give the same bits, which are returned."""
    compiled = jax.jit(function)
    first, second = compiled(*args), compiled(*args)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    return first


def assert_agree(functions, *args, repeats=5):
    """Several runs of every function, compiled, give the same bits."""
    compiled = map(jax.jit, functions)
    first, *others = [function(*args) for function in compiled for _ in range(repeats)]
    for other in others:
        np.testing.assert_array_equal(other, first)


def assert_same_bits(result, expected):
    """Same structure, shapes, dtypes and bits, those of a NaN aside."""
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(_bits(ours), _bits(theirs))


def _bits(x):
    numbers = np.asarray(x)  # in NumPy: a NaN converted by a GPU has other bits than one converted by a CPU
    if jnp.issubdtype(numbers.dtype, jnp.floating):
        numbers = np.where(np.isnan(numbers), numbers.dtype.type(np.nan), numbers)
    return numbers.view(f"uint{8 * numbers.itemsize}")
