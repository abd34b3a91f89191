"""Compresses a dense matrix and its transpose to 2:4 under one mask of 4 x 4 tiles, from one read.

A thread block takes 64 x 64 entries. A thread holds two tiles of 4 x 4, reads their masks, and takes the
survivors of their rows and of their columns; only these, and the metadata, go to other threads.

Numerics: the reference bit for bit.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_lm.ops.checks import check_selection_dtypes
from sparse_lm.ops.formats import METADATA_OF_MASKS, TILE, Sparse24, types_24
from sparse_lm.ops.triton.frame import packed_24
from sparse_lm.ops.triton.frame.tiles import (
    GROUPS,
    GROUPS_LAYOUT,
    as_words,
    load_tile,
    locate_survivors,
    offsets,
    store_metadata,
)
from sparse_lm.ops.triton.frame.two_of_four import join_members, join_nibbles, members, pack_halves
from sparse_lm.ops.triton.passes.sparsify_24 import call_by_tiles

_TILE = gl.constexpr(TILE)
_METADATA_OF_MASKS = gl.constexpr(METADATA_OF_MASKS)
_ENTRIES_LAYOUT = gl.constexpr(  # whole tiles of 4 x 4; half a warp loads a row
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [32, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [0, 32], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[TILE, TILE],
    )
)


@gluon.jit
def _both_halves(bits):
    """Spreads the lowest bit throughout the low half of a word, the next one throughout the high half."""
    return ((bits & 1) | (bits & 2) << 15) * 0xFFFF


@gluon.jit
def _columns(upper, lower):
    """Turns 2 x 2 entries in words of a row each into words of a column each, and transposes both."""
    return packed_24.zip_halves(upper.permute([1, 0]), lower.permute([1, 0]))


@gluon.jit
def _column_bits(mask, COLUMN: gl.constexpr):
    """Joins the four bits of a mask's column, side by side."""
    return (mask >> COLUMN & 0x1111) * 0x1248 >> 12 & 15


@gluon.jit
def _store_form(words, mask, values, metadata, row_tile, k_tile, K_TILES: gl.constexpr):
    """Stores survivors and metadata of tiles of 4 x 4, whose rows are words of two entries, [16 groups, 16 rows]."""
    kept, nibbles = (), ()
    for row in gl.static_range(4):
        nibble = (_METADATA_OF_MASKS >> ((mask >> 4 * row & 15) << 2).to(gl.int64)).to(gl.int32) & 15
        kept += (packed_24.take_two(words[row][0], words[row][1], nibble),)
        nibbles += (nibble,)
    kept = gl.convert_layout(join_members(*kept).permute([1, 0]), GROUPS_LAYOUT)
    gl.store(locate_survivors(values, row_tile, k_tile, K_TILES), kept)
    each_row: gl.constexpr = kept.reshape([GROUPS, 4, GROUPS]).type.layout
    nibbles = gl.convert_layout(join_nibbles(*nibbles).permute([1, 0]), gl.SliceLayout(1, each_row))[:, None, :]
    row = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, each_row)))[None, :, None]
    nibble = gl.convert_layout((nibbles >> 4 * row & 15).reshape([_TILE, GROUPS]), GROUPS_LAYOUT, assert_trivial=True)
    store_metadata(nibble, metadata, row_tile, k_tile, K_TILES)


@gluon.jit
def sparsify_24_tiles_kernel(
    x, mask, values, metadata, values_t, metadata_t, ROWS: gl.constexpr, COLUMNS: gl.constexpr
):
    """Stores both forms of a tile. The mask has bytes, 0 or 1, of which a row is padded to a multiple of 4."""
    ROW_TILES: gl.constexpr = (ROWS + _TILE - 1) // _TILE
    TILES: gl.constexpr = (COLUMNS + _TILE - 1) // _TILE
    dtype: gl.constexpr = values.dtype.element_ty
    row_tile, tile = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    a, b, c, d = members(load_tile(x, row_tile, tile, ROWS, COLUMNS, _ENTRIES_LAYOUT))
    layout: gl.constexpr = a.type.layout
    MASK_GROUPS: gl.constexpr = (COLUMNS + 3) // 4
    row, group, offset = offsets(row_tile, tile, MASK_GROUPS, GROUPS, layout)
    bytes = gl.load(as_words(mask) + offset, mask=(row < ROWS) & (group < MASK_GROUPS), other=0)
    # The product has the lowest bits of the four bytes side by side in bits 24 to 27; a tile's mask then has 16 bits.
    mask = pack_halves((bytes * 0x01020408 >> 24 & 15).permute([1, 0]))

    a, b = members(a.permute([1, 0])), members(b.permute([1, 0]))
    c, d = members(c.permute([1, 0])), members(d.permute([1, 0]))
    rows = ()
    for row in gl.static_range(4):
        low, high = packed_24.pack(a[row], b[row], dtype), packed_24.pack(c[row], d[row], dtype)
        bits = mask >> 4 * row
        rows += ((low & _both_halves(bits), high & _both_halves(bits >> 2)),)
    _store_form(rows, mask, values, metadata, row_tile, tile, TILES)

    left, right = _columns(rows[0][0], rows[1][0]), _columns(rows[0][1], rows[1][1])
    low_left, low_right = _columns(rows[2][0], rows[3][0]), _columns(rows[2][1], rows[3][1])
    columns = (left[0], low_left[0]), (left[1], low_left[1]), (right[0], low_right[0]), (right[1], low_right[1])
    bits = _column_bits(mask, 0), _column_bits(mask, 1), _column_bits(mask, 2), _column_bits(mask, 3)
    _store_form(columns, join_nibbles(*bits).permute([1, 0]), values_t, metadata_t, tile, row_tile, ROW_TILES)


def sparsify_24_tiles(x: Array, mask: Array, *, dtype: DTypeLike) -> tuple[Sparse24, Sparse24]:
    """See `sparse_lm.ops.sparsify_24_tiles`; refuses the dtypes that `sparsify_24` does."""
    check_selection_dtypes(x.dtype, dtype)
    mask = jnp.pad(mask, ((0, 0), (0, -mask.shape[1] % 4)))
    out = *types_24(*x.shape, dtype), *types_24(*x.shape[::-1], dtype)
    forms = call_by_tiles(sparsify_24_tiles_kernel, x, mask, out=out)
    return Sparse24(*forms[:2], x.shape), Sparse24(*forms[2:], x.shape[::-1])
