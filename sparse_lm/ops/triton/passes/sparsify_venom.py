"""Sparsifies a dense matrix, or Y = relu(H)^2 of one, to V:2:M.

A thread block takes v rows and 16 groups of m columns: 64 condensed columns, what a tile of metadata describes.
It reads whole rows and sums up the squares of every column; chooses the four columns of largest norm of each group;
and reads those again, from the cache, a group of four to a thread, to select in each row.

Numerics: norms in float32, in an order of their own, so two columns of nearly equal norm may rank otherwise than
in the reference. All else is the reference bit for bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_lm.ops.checks import check_hidden_dtype
from sparse_lm.ops.formats import TILE, HiddenStats, SparseVenom, types_24
from sparse_lm.ops.triton.frame import packed_24
from sparse_lm.ops.triton.frame.gluon_call import align_rows, gluon_call
from sparse_lm.ops.triton.frame.tiles import GROUPS, WORDS, as_words, indices, rows_layout, tile_layout
from sparse_lm.ops.triton.frame.two_of_four import magnitude_rank, pack_words
from sparse_lm.ops.triton.passes.sparsify_24 import STATS

_TILE = gl.constexpr(TILE)
_WIDEST_GROUP = 64
_CHUNK = gl.constexpr(16)  # words that a thread reads at one time


@gluon.jit
def _order(a, b):
    return gl.minimum(a, b), gl.maximum(a, b)


@gluon.jit
def _four_largest(energy, M: gl.constexpr):
    """Finds places of the four largest of each group of energies [16, M], ascending: four times [16]."""
    place = gl.arange(0, M, gl.SliceLayout(0, energy.type.layout))[None, :]
    key = magnitude_rank(energy).to(gl.int64) << 32 | (M - 1 - place).to(gl.int64)  # of equal ones the first
    places = ()
    for _ in gl.static_range(4):
        largest = gl.max(key, axis=1)
        places += (M - 1 - largest.to(gl.int32),)
        key = gl.where(key == largest[:, None], -1, key)
    a, b, c, d = places
    a, b = _order(a, b)
    c, d = _order(c, d)
    a, c = _order(a, c)
    b, d = _order(b, d)
    b, c = _order(b, c)
    return a, b, c, d


@gluon.jit
def sparsify_venom_kernel(
    x,
    values,
    metadata,
    columns,
    stats,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUPED_COLUMNS: gl.constexpr,
    V: gl.constexpr,
    M: gl.constexpr,
    ACTIVATE: gl.constexpr,
):
    """Sparsifies a tile of x [ROWS, COLUMNS], of which GROUPED_COLUMNS are in groups, or if ACTIVATE of relu(x)^2, and
    then stores its `HiddenStats`."""
    dtype: gl.constexpr = x.dtype.element_ty
    K_TILES: gl.constexpr = (4 * GROUPED_COLUMNS + M * _TILE - 1) // (M * _TILE)
    k_tile, block = gl.program_id(0) % K_TILES, gl.program_id(0) // K_TILES

    # Squares of every column, summed over whole rows: a thread keeps to its columns.
    rows: gl.constexpr = 32 * gl.num_warps() * _CHUNK // (8 * M)
    whole: gl.constexpr = rows_layout(4, 2 * M, gl.num_warps())
    first_row, column = indices(rows, whole, 0), k_tile * (8 * M) + indices(8 * M, whole, 1)
    even = gl.full([rows, 8 * M], 0.0, gl.float32, whole)
    odd = gl.full([rows, 8 * M], 0.0, gl.float32, whole)
    nonzeros = gl.sum(gl.full([rows, 8 * M], 0, gl.int32, whole).reshape([rows, 2 * M, 4]), axis=2)
    for start in range(0, V, rows):
        at = block * V + start + first_row
        source = as_words(x) + at.to(gl.int64) * (COLUMNS // 2) + column
        pairs = gl.load(source, mask=(at < ROWS) & (column < COLUMNS // 2), other=0)
        if ACTIVATE:
            pairs = packed_24.squared_relu(pairs, dtype)
            nonzeros += gl.sum(packed_24.mark_nonzeros(pairs).reshape([rows, 2 * M, 4]), axis=2)
        a, b = packed_24.unpack(pairs, dtype)
        even += a * a
        odd += b * b
    nonzeros = gl.sum(gl.sum((nonzeros & 0xFFFF) + (nonzeros >> 16), axis=1), axis=0)
    energy = gl.join(gl.sum(even, axis=0), gl.sum(odd, axis=0)).reshape([GROUPS * M])

    # The columns of each group that are kept, which a warp has by itself.
    of_groups: gl.constexpr = rows_layout(max(1, M // 32), M, gl.num_warps())
    places = _four_largest(gl.convert_layout(energy.reshape([GROUPS, M]), of_groups), M)
    gathered: gl.constexpr = rows_layout(1, GROUPS, gl.num_warps())  # lanes side by side read of few rows
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, gathered))
    first = (k_tile * GROUPS + group) * M
    listed = ()
    for member in gl.static_range(4):
        place = gl.convert_layout(places[member], gl.SliceLayout(0, gathered))
        kept_column = gl.where(first < GROUPED_COLUMNS, first + place, GROUPED_COLUMNS)
        gl.store(columns + (block * K_TILES + k_tile) * _TILE + 4 * group + member, kept_column)
        listed += (kept_column[None, :],)

    # Two of each four in each row.
    packed: gl.constexpr = tile_layout(GROUPS, gl.num_warps())
    word = gl.arange(0, WORDS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    kept_energy = gl.full([_TILE, GROUPS], 0.0, gl.float32, gathered)
    for start in range(0, V, _TILE):
        row = block * V + start + indices(_TILE, gathered, 0)
        origin = row.to(gl.int64) * COLUMNS
        inside = (row < ROWS) & (listed[0] < GROUPED_COLUMNS)
        halves = ()
        for member in gl.static_range(4):
            half = gl.load(x.to(gl.pointer_type(gl.int16)) + (origin + listed[member]), mask=inside, other=0)
            halves += (half.to(gl.int32) & 0xFFFF,)
        low, high = halves[0] | halves[1] << 16, halves[2] | halves[3] << 16
        if ACTIVATE:
            low, high = packed_24.squared_relu(low, dtype), packed_24.squared_relu(high, dtype)
        kept, nibble = packed_24.two_of_four(low, low, high, high, SIGNED=not ACTIVATE)
        gl.store(as_words(values) + row.to(gl.int64) * (K_TILES * GROUPS) + k_tile * GROUPS + group[None, :], kept)
        words = pack_words(gl.convert_layout(nibble, packed))
        target = metadata + ((block * V + start) // _TILE * K_TILES + k_tile) * WORDS + word
        gl.store(target, gl.convert_layout(words, word.type.layout))
        if ACTIVATE:
            e, f = packed_24.unpack(kept, dtype)
            kept_energy += e * e + f * f
    if ACTIVATE:
        stats += (block * K_TILES + k_tile) * STATS
        gl.store(stats, nonzeros.to(gl.float32))
        gl.store(stats + 1, gl.sum(energy, axis=0))
        gl.store(stats + 2, gl.sum(kept_energy.reshape([_TILE * GROUPS]), axis=0))


def sparsify_venom(x: Array, v: int, m: int, *, dtype: DTypeLike) -> SparseVenom:
    """See `sparse_lm.ops.sparsify_venom`; refuses what `squared_relu_venom` does, and values of another dtype."""
    if x.dtype != dtype:
        raise NotImplementedError(f"needs values in the dtype of the matrix, {x.dtype}, not {dtype}")
    return _sparsify(x, v, m, activate=False)[0]


def squared_relu_venom(h: Array, v: int, m: int) -> tuple[SparseVenom, HiddenStats]:
    """See `sparse_lm.ops.squared_relu_venom`; refuses matrices that are not of 16-bit floats, a v that is no multiple
    of 64, and an m that is no power of two from 4 to 64."""
    return _sparsify(h, v, m, activate=True)


def _sparsify(x: Array, v: int, m: int, *, activate: bool) -> tuple[SparseVenom, HiddenStats]:
    rows, width = x.shape
    check_hidden_dtype(x.dtype)
    if v % TILE or m & (m - 1) or m > _WIDEST_GROUP:
        raise NotImplementedError(
            f"needs v to be a multiple of {TILE}, m a power of two up to {_WIDEST_GROUP}, not {v}, {m}"
        )
    blocks, k_tiles = -(-rows // v), -(-4 * width // (m * TILE))
    padded = align_rows(x)
    values, metadata, kept, stats = gluon_call(
        sparsify_venom_kernel,
        padded,
        out=(
            *types_24(blocks * v, k_tiles * TILE, x.dtype),
            jax.ShapeDtypeStruct((blocks, k_tiles * TILE), jnp.int32),
            jax.ShapeDtypeStruct((blocks, k_tiles, STATS.value), jnp.float32),
        ),
        blocks=blocks * k_tiles,
        warps=max(4, min(16, m // 2)),
        constants=dict(ROWS=rows, COLUMNS=padded.shape[1], GROUPED_COLUMNS=width, V=v, M=m, ACTIVATE=activate),
    )
    return SparseVenom(values, metadata, kept, x.shape, v, m), HiddenStats(*jnp.sum(stats, axis=(0, 1)))
