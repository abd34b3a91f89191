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
from sparse_lm.ops.formats import TILE, HiddenStats, SparseVenom
from sparse_lm.ops.triton.frame import packed_24
from sparse_lm.ops.triton.frame.gluon_call import align_rows, gluon_call
from sparse_lm.ops.triton.frame.tiles import GROUPS, WORDS, as_words, groups_layout
from sparse_lm.ops.triton.frame.two_of_four import magnitude_rank, pack_words
from sparse_lm.ops.triton.passes.sparsify_24 import STATS, outputs

_TILE = gl.constexpr(TILE)
_WIDEST_GROUP = 64
_CHUNK = gl.constexpr(16)  # words that a thread reads at one time


@gluon.constexpr_function
def _rows_layout(m, warps):
    """Returns the layout of words of whole rows of a tile: a thread keeps to its columns."""
    across = min(32, GROUPS * m // 8)
    return gl.BlockedLayout([1, 4], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def _energies_layout(m, warps):
    """Returns the layout of the columns of each group, within a warp."""
    across = min(32, m)
    return gl.BlockedLayout([1, max(1, m // 32)], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def _gathered_layout(warps):
    """Returns the layout of groups of condensed columns: lanes side by side read of few rows."""
    return gl.BlockedLayout([1, 1], [2, 16], [warps, 1], [1, 0])


@gluon.jit
def _sum_squares(
    x,
    block,
    k_tile,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    V: gl.constexpr,
    M: gl.constexpr,
    ACTIVATE: gl.constexpr,
):
    """Sums of the squares of a tile's columns over a block's rows, [16 M]; if ACTIVATE, how many are not zero."""
    layout: gl.constexpr = _rows_layout(M, gl.num_warps())
    rows: gl.constexpr = 32 * gl.num_warps() * _CHUNK // (8 * M)
    row = gl.arange(0, rows, gl.SliceLayout(1, layout))[:, None]
    column = k_tile * (8 * M) + gl.arange(0, 8 * M, gl.SliceLayout(0, layout))[None, :]
    even = gl.full([rows, 8 * M], 0.0, gl.float32, layout)
    odd = gl.full([rows, 8 * M], 0.0, gl.float32, layout)
    nonzeros = gl.sum(gl.full([rows, 8 * M], 0, gl.int32, layout).reshape([rows, 2 * M, 4]), axis=2)
    for start in range(0, V, rows):
        at = block * V + start + row
        source = as_words(x) + at.to(gl.int64) * (COLUMNS // 2) + column
        words = gl.load(source, mask=(at < ROWS) & (column < COLUMNS // 2), other=0)
        if ACTIVATE:
            words = packed_24.squared_relu(words, x.dtype.element_ty)
            nonzeros += gl.sum(packed_24.mark_nonzeros(words).reshape([rows, 2 * M, 4]), axis=2)
        a, b = packed_24.unpack(words, x.dtype.element_ty)
        even += a * a
        odd += b * b
    nonzeros = gl.sum(gl.sum((nonzeros & 0xFFFF) + (nonzeros >> 16), axis=1), axis=0)
    return gl.join(gl.sum(even, axis=0), gl.sum(odd, axis=0)).reshape([GROUPS * M]), nonzeros


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
def _gather(x, row, column, inside):
    """Numbers [64, 16] in the low halves of words; zeros past the last row and column."""
    number = gl.load(x.to(gl.pointer_type(gl.int16)) + (row + column), mask=inside, other=0)
    return number.to(gl.int32) & 0xFFFF


@gluon.jit
def _sparsify_venom_kernel(
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
    K_TILES: gl.constexpr,
    ACTIVATE: gl.constexpr,
):
    dtype: gl.constexpr = x.dtype.element_ty
    k_tile, block = gl.program_id(0) % K_TILES, gl.program_id(0) // K_TILES
    energy, nonzeros = _sum_squares(x, block, k_tile, ROWS, COLUMNS, V, M, ACTIVATE)
    of_groups: gl.constexpr = _energies_layout(M, gl.num_warps())
    places = _four_largest(gl.convert_layout(energy.reshape([GROUPS, M]), of_groups), M)

    gathered: gl.constexpr = _gathered_layout(gl.num_warps())
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, gathered))
    first = (k_tile * GROUPS + group) * M
    listed = ()
    for member in gl.static_range(4):
        place = gl.convert_layout(places[member], gl.SliceLayout(0, gathered))
        column = gl.where(first < GROUPED_COLUMNS, first + place, GROUPED_COLUMNS)
        gl.store(columns + (block * K_TILES + k_tile) * _TILE + 4 * group + member, column)
        listed += (column[None, :],)

    packed: gl.constexpr = groups_layout(gl.num_warps())
    word = gl.arange(0, WORDS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    kept_energy = gl.full([_TILE, GROUPS], 0.0, gl.float32, gathered)
    for start in range(0, V, _TILE):
        row = block * V + start + gl.arange(0, _TILE, gl.SliceLayout(1, gathered))[:, None]
        origin = row.to(gl.int64) * COLUMNS
        inside = (row < ROWS) & (listed[0] < GROUPED_COLUMNS)
        a, b = _gather(x, origin, listed[0], inside), _gather(x, origin, listed[1], inside)
        c, d = _gather(x, origin, listed[2], inside), _gather(x, origin, listed[3], inside)
        low, high = a | b << 16, c | d << 16
        if ACTIVATE:
            low, high = packed_24.squared_relu(low, dtype), packed_24.squared_relu(high, dtype)
        kept, nibble = packed_24.two_of_four(low, high, not ACTIVATE)
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
    """See `sparse_lm.ops.sparsify_venom`.

    Raises:
      NotImplementedError: the dtypes, v or m.
    """
    if x.dtype != dtype:
        raise NotImplementedError(f"needs values in the dtype of the matrix, {x.dtype}, not {dtype}")
    return _call(x, v, m, activate=False)[0]


def squared_relu_venom(h: Array, v: int, m: int) -> tuple[SparseVenom, HiddenStats]:
    """See `sparse_lm.ops.squared_relu_venom`.

    Raises:
      NotImplementedError: the dtype, v or m.
    """
    return _call(h, v, m, activate=True)


def _call(x: Array, v: int, m: int, *, activate: bool) -> tuple[SparseVenom, HiddenStats]:
    rows, width = x.shape
    check_hidden_dtype(x.dtype)
    if v % TILE or m & (m - 1) or not 4 <= m <= _WIDEST_GROUP:
        raise NotImplementedError(
            f"needs v to be a multiple of {TILE}, m a power of two up to {_WIDEST_GROUP}, not {v}, {m}"
        )
    blocks, k_tiles = -(-rows // v), -(-4 * width // (m * TILE))
    padded = align_rows(x)
    values, metadata, kept, stats = gluon_call(
        _sparsify_venom_kernel,
        padded,
        out=(
            *outputs((blocks * v, k_tiles * TILE), x.dtype),
            jax.ShapeDtypeStruct((blocks, k_tiles * TILE), jnp.int32),
            jax.ShapeDtypeStruct((blocks, k_tiles, STATS.value), jnp.float32),
        ),
        blocks=blocks * k_tiles,
        warps=max(4, min(16, m // 2)),
        constants=dict(
            ROWS=rows,
            COLUMNS=padded.shape[1],
            GROUPED_COLUMNS=width,
            V=v,
            M=m,
            K_TILES=k_tiles,
            ACTIVATE=activate,
        ),
    )
    return SparseVenom(values, metadata, kept, x.shape, v, m), HiddenStats(*jnp.sum(stats, axis=(0, 1)))
