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
from sparse_lm.ops.formats import METADATA_OF_MASKS, TILE, Sparse24
from sparse_lm.ops.triton.frame import packed_24
from sparse_lm.ops.triton.frame.tiles import GROUPS, GROUPS_LAYOUT, load_tile, offsets, store_metadata, store_survivors
from sparse_lm.ops.triton.frame.two_of_four import members
from sparse_lm.ops.triton.passes.sparsify_24 import call_by_tiles, outputs

_TILE = gl.constexpr(TILE)
_ENTRIES_LAYOUT = gl.constexpr(  # whole tiles of 4 x 4; half a warp loads a row
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [32, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [0, 32], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[TILE, TILE],
    )
)
_MASK_LAYOUT = gl.constexpr(  # of one number for each row of a tile of 4 x 4
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [32, 0]],
        lane_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[TILE, TILE // 4],
    )
)
_EACH_ROW_LAYOUT = gl.constexpr(  # GROUPS_LAYOUT, with the four rows of a tile of 4 x 4 as a dimension of their own
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [2, 0, 0]],
        lane_bases=[[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [1, 0, 0]],
        warp_bases=[[4, 0, 0], [8, 0, 0]],
        block_bases=[],
        shape=[TILE // 4, 4, TILE // 4],
    )
)


_METADATA_OF_MASKS = gl.constexpr(METADATA_OF_MASKS)


@gluon.jit
def _split_rows(x):
    """Splits [4 R, C] into rows 0, 1, 2 and 3 of each four, [R, C]."""
    even, odd = gl.split(x.reshape([x.shape[0] // 4, 2, 2, x.shape[1]]).permute([0, 3, 1, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def _join_rows(first, second, third, fourth):
    """Inverts `_split_rows`."""
    joined = gl.join(gl.join(first, third), gl.join(second, fourth)).permute([0, 2, 3, 1])
    return joined.reshape([4 * first.shape[0], first.shape[1]])


@gluon.jit
def _load_rows(x, row_tile, tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Loads the entries of tiles of 4 x 4: four times four float32 [16, 16]."""
    a, b, c, d = members(load_tile(x, row_tile, tile, ROWS, COLUMNS, _ENTRIES_LAYOUT))
    a, b, c, d = _split_rows(a), _split_rows(b), _split_rows(c), _split_rows(d)
    return (
        (a[0], b[0], c[0], d[0]),
        (a[1], b[1], c[1], d[1]),
        (a[2], b[2], c[2], d[2]),
        (a[3], b[3], c[3], d[3]),
    )


@gluon.jit
def _load_mask(mask, row_tile, tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Loads 16 bits for each tile of 4 x 4, row by row, from bytes that are 0 or 1. COLUMNS is a multiple of 4."""
    row, group, offset = offsets(row_tile, tile, COLUMNS // 4, GROUPS, _MASK_LAYOUT)
    words = gl.load(mask.to(gl.pointer_type(gl.int32)) + offset, mask=(row < ROWS) & (group < COLUMNS // 4), other=0)
    # The product has the lowest bits of the four bytes side by side in bits 24 to 27.
    return _join_bits(*_split_rows(words * 0x01020408 >> 24 & 15))


@gluon.jit
def _join_bits(first, second, third, fourth):
    """Joins four bits each to 16."""
    return first | second << 4 | third << 8 | fourth << 12


@gluon.jit
def _masked_words(row, bits, dtype: gl.constexpr):
    """Packs members 0 and 1, and 2 and 3, of a row, rounded, in words; zeros where its mask has none."""
    low, high = packed_24.pack(row[0], row[1], dtype), packed_24.pack(row[2], row[3], dtype)
    return low & _both_halves(bits), high & _both_halves(bits >> 2)


@gluon.jit
def _both_halves(bits):
    """Spreads the lowest bit throughout the low half of a word, the next one throughout the high half."""
    return ((bits & 1) | (bits & 2) << 15) * 0xFFFF


@gluon.jit
def _transpose(words):
    """Transposes tiles of 4 x 4 in words of two: four times two [I, J] to four times two [J, I]."""
    upper_left, upper_right = _columns(words[0][0], words[1][0]), _columns(words[0][1], words[1][1])
    lower_left, lower_right = _columns(words[2][0], words[3][0]), _columns(words[2][1], words[3][1])
    first, second = (upper_left[0], lower_left[0]), (upper_left[1], lower_left[1])
    third, fourth = (upper_right[0], lower_right[0]), (upper_right[1], lower_right[1])
    return first, second, third, fourth


@gluon.jit
def _columns(upper, lower):
    """Turns 2 x 2 entries in words of a row each into words of a column each."""
    return packed_24.zip_halves(upper.permute([1, 0]), lower.permute([1, 0]))


@gluon.jit
def _transpose_mask(mask):
    """Transposes the masks of tiles of 4 x 4, 16 bits each [I, J], to those of their transposes, [J, I]."""
    mask = mask.permute([1, 0])
    return _join_bits(_column_bits(mask, 0), _column_bits(mask, 1), _column_bits(mask, 2), _column_bits(mask, 3))


@gluon.jit
def _column_bits(mask, COLUMN: gl.constexpr):
    """Joins the four bits of a mask's column, side by side."""
    return (mask >> COLUMN & 0x1111) * 0x1248 >> 12 & 15


@gluon.jit
def _keep(row, bits):
    """Packs survivors of a row in one word, and gives their nibble, by its four bits in the mask."""
    nibble = (_METADATA_OF_MASKS >> (bits << 2).to(gl.int64)).to(gl.int32) & 15
    return packed_24.take_two(row[0], row[1], nibble), nibble


@gluon.jit
def _store_form(words, mask, values, metadata, row_tile, k_tile, K_TILES: gl.constexpr):
    """Stores survivors of tiles of 4 x 4, four times two words [16, 16], by their masks, and metadata."""
    first, first_nibble = _keep(words[0], mask & 15)
    second, second_nibble = _keep(words[1], mask >> 4 & 15)
    third, third_nibble = _keep(words[2], mask >> 8 & 15)
    fourth, fourth_nibble = _keep(words[3], mask >> 12)
    kept = gl.convert_layout(_join_rows(first, second, third, fourth), GROUPS_LAYOUT)
    store_survivors(kept, values, row_tile, k_tile, K_TILES)
    nibbles = _join_bits(first_nibble, second_nibble, third_nibble, fourth_nibble)
    nibbles = gl.convert_layout(nibbles, gl.SliceLayout(1, _EACH_ROW_LAYOUT))[:, None, :]
    row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, _EACH_ROW_LAYOUT))
    nibble = nibbles >> 4 * gl.arange(0, 4, row)[None, :, None] & 15
    nibble = gl.convert_layout(nibble.reshape([_TILE, GROUPS]), GROUPS_LAYOUT, assert_trivial=True)
    store_metadata(nibble, metadata, row_tile, k_tile, K_TILES)


@gluon.jit
def _store_forms(
    rows, mask, values, metadata, values_t, metadata_t, row_tile, tile, ROW_TILES: gl.constexpr, TILES: gl.constexpr
):
    """Stores both forms of a tile, of the entries of its tiles of 4 x 4 and their masks."""
    dtype: gl.constexpr = values.dtype.element_ty
    first, second = _masked_words(rows[0], mask, dtype), _masked_words(rows[1], mask >> 4, dtype)
    third, fourth = _masked_words(rows[2], mask >> 8, dtype), _masked_words(rows[3], mask >> 12, dtype)
    words = first, second, third, fourth
    _store_form(words, mask, values, metadata, row_tile, tile, TILES)
    _store_form(_transpose(words), _transpose_mask(mask), values_t, metadata_t, tile, row_tile, ROW_TILES)


@gluon.jit
def _sparsify_24_tiles_kernel(
    x,
    mask,
    values,
    metadata,
    values_t,
    metadata_t,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    MASK_COLUMNS: gl.constexpr,
):
    ROW_TILES: gl.constexpr = (ROWS + _TILE - 1) // _TILE
    TILES: gl.constexpr = (COLUMNS + _TILE - 1) // _TILE
    row_tile, tile = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    rows = _load_rows(x, row_tile, tile, ROWS, COLUMNS)
    mask = _load_mask(mask, row_tile, tile, ROWS, MASK_COLUMNS)
    mask = gl.convert_layout(mask, rows[0][0].type.layout, assert_trivial=True)
    _store_forms(rows, mask, values, metadata, values_t, metadata_t, row_tile, tile, ROW_TILES, TILES)


def sparsify_24_tiles(x: Array, mask: Array, *, dtype: DTypeLike) -> tuple[Sparse24, Sparse24]:
    """See `sparse_lm.ops.sparsify_24_tiles`.

    Raises:
      NotImplementedError: the dtypes.
    """
    check_selection_dtypes(x.dtype, jnp.dtype(dtype))
    out = *outputs(x.shape, dtype), *outputs(x.shape[::-1], dtype)
    mask = jnp.pad(mask, ((0, 0), (0, -mask.shape[1] % 4)))
    constants = dict(ROWS=x.shape[0], COLUMNS=x.shape[1], MASK_COLUMNS=mask.shape[1])
    forms = call_by_tiles(_sparsify_24_tiles_kernel, x, mask, out=out, constants=constants)
    values, metadata, values_t, metadata_t = forms
    return Sparse24(values, metadata, x.shape), Sparse24(values_t, metadata_t, x.shape[::-1])
