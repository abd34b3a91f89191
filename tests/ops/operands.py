"""Random operands and what the products of them must be."""

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lm.ops import fp8
from sparse_lm.ops.formats import Sparse24, SparseVenom, pack_metadata
from sparse_lm.ops.row_order import RowOrder
from tests.ops.numpy_gates import gate

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


def random_venom(m_rows, k, v, m, dtype, seed, contiguous=1) -> SparseVenom:
    """[m_rows, K] in V:2:M form: four columns of each m, or contiguous ones, at random."""
    rows, kept = -(-m_rows // max(v, 64)) * max(v, 64), 4 * k // m
    blocks = -(-m_rows // v)
    if contiguous > 1:
        columns = random_contiguous(blocks, kept, contiguous, k, seed + 1)
    else:
        rng = np.random.default_rng(seed)
        chosen = np.sort(np.argsort(rng.random((blocks, k // m, m)), axis=-1)[..., :4], axis=-1)
        columns = (chosen + m * np.arange(k // m)[:, None]).reshape(blocks, kept)
    columns = jnp.pad(jnp.int32(columns), ((0, rows // v - blocks), (0, -kept % 64)), constant_values=k)
    condensed = random_24(rows, kept, dtype, seed + 1)
    return SparseVenom(condensed.values, condensed.metadata, columns, (m_rows, k), v, m, contiguous)


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


def random_rows(tokens, slots, seed) -> RowOrder:
    """An order of tokens in which the slots that are padding lie anywhere."""
    rng = np.random.default_rng(seed)
    position = rng.permutation(slots)[:tokens]
    token = np.full(slots, tokens)
    token[position] = np.arange(tokens)
    return RowOrder(jnp.asarray(token, jnp.int32), jnp.asarray(position, jnp.int32))


def product_operands(op, shape, dtype=jnp.bfloat16, scale=1.0):
    """Random operands and options of a product; `scale` is that of the sparse operand.

    Shapes are (m, k, n) of matmul_24 and matmul_24_fp8, (rows, k, kept, n, v, contiguous) of matmul_venom,
    (tokens, dim, neurons, kept, v, contiguous) of sampled_matmul_24, and (tokens, n, kept, rows, v, contiguous) of
    scattered_matmul_24.
    """
    if op == "matmul_24":
        m, k, n = shape
        return (random_24(m, k, dtype, 0, scale=scale), random((k, n), dtype, 1)), {}
    if op == "matmul_24_fp8":
        m, k, n = shape
        powers = 2.0 ** np.random.default_rng(2).integers(-20, 20, (m, 1))
        return (random_24(m, k, fp8.E4M3, 0), random((n, k), fp8.E4M3, 1), jnp.asarray(powers, jnp.float32)), {}
    if op == "matmul_venom":
        rows, k, kept, n, v, contiguous = shape
        a = random_venom(rows, k, v, 4 * k // kept, dtype, 0, contiguous)
        return (a, random((k, n), dtype, 2)), {}
    if op == "sampled_matmul_24":
        tokens, dim, neurons, kept, v, contiguous = shape
        blocks = -(-tokens // v)
        ids = random_contiguous(blocks, kept, contiguous, neurons, 3)
        ids = ids if contiguous > 1 else random_columns(blocks, kept, neurons, 3)
        operands = random_24(neurons, dim, dtype, 0, scale=scale), random((tokens, dim), dtype, 1), ids
        return operands, dict(v=v, contiguous=contiguous)
    tokens, n, kept, rows, v, contiguous = shape
    ids = random_contiguous(-(-tokens // v), kept, contiguous, rows, 3)
    operands = random_24(kept, tokens, dtype, 0, scale=scale), random((tokens, n), dtype, 1), ids
    return operands, dict(v=v, rows=rows, contiguous=contiguous)


def exact_product(op, sparse, dense, *more, v=0, rows=None, out_transposed=False, **_):
    """A product of the matrix that `sparse` is and another, in float64; arguments otherwise as the op's."""
    sparse, dense, blocks = np.asarray(sparse, np.float64), np.asarray(dense, np.float64), range(0, len(dense), v or 1)
    if op == "sampled_matmul_24":
        every = np.pad(sparse, ((0, 1), (0, 0)))  # the neuron past the last is zeros
        return np.concatenate([dense[t : t + v] @ every[np.asarray(more[0])[t // v]].T for t in blocks])
    if op == "scattered_matmul_24":
        out = np.zeros((rows + len(sparse), dense.shape[1]))  # past the last row is what is left out
        for t in blocks:
            out[np.asarray(more[0])[t // v]] += sparse[:, t : t + v] @ dense[t : t + v]
        return out[:rows]
    if op == "matmul_24_fp8":
        return np.asarray(more[0], np.float64) * (sparse @ dense.T)
    out = sparse @ dense
    out = out if rows is None else out[np.asarray(rows.position)]
    return out.T if out_transposed else out


def assert_as_good_as_reference(result, reference, exact):
    """The error against `exact` is at most 1.5 times the reference's, plus float32's own rounding."""
    assert result.dtype == reference.dtype
    assert relative_error(result, exact) <= 1.5 * relative_error(reference, exact) + 1e-6


def relative_error(found, exact):
    """The error in relation to what is exact, or where that is zeros, itself."""
    found, exact = (np.asarray(a, np.float64) for a in (found, exact))
    return np.linalg.norm(found - exact) / (np.linalg.norm(exact) or 1)


def assert_errors_are_as_small(results, of_reference, exact):
    """The error of each result is at most 1.5 times the reference's."""
    errors = [list(map(relative_error, found, exact)) for found in (results, of_reference)]
    assert len(results) == len(of_reference) == len(exact)
    assert all(ours <= 1.5 * theirs for ours, theirs in zip(*errors, strict=True)), errors


def assert_repeats(function, *args, runs=2):
    """Runs of a compiled function give the same bits, which are returned."""
    compiled = jax.jit(function)
    first = compiled(*args)
    for _ in range(runs - 1):
        assert_same_bits(compiled(*args), first)
    return first


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


def exact_stats(h, kept):
    """Computes `HiddenStats` of Y as it is rounded, in float64; XLA may leave that rounding out of its sums."""
    y = np.asarray(jnp.asarray(np.square(np.maximum(np.asarray(h, np.float32), 0)), h.dtype), np.float64)
    return np.count_nonzero(y), np.square(y).sum(), np.square(np.asarray(kept, np.float64)).sum()


def exact_hidden(dy, saved, activation):
    """Computes dH and Y in float64."""
    dy, saved = np.asarray(dy, np.float64), np.asarray(saved, np.float64)
    if activation == "squared_relu":
        return 2 * np.sqrt(saved) * dy, saved
    g, own = saved[:, ::2], saved[:, 1::2]
    value, slope = gate(g, activation)
    return np.stack([dy * own * slope, dy * value], axis=-1).reshape(saved.shape), value * own
