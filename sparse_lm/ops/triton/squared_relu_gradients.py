"""dH = 2 sqrt(Y) dY where Y is stored, and the 2:4 forms of the transposes of dH and Y, in one pass.

A thread block takes 64 tokens of 64 (condensed) columns. Of a Venom Y the transposes have a row for every neuron:
those of the kept ones are scattered over matrices of empty groups.

Numerics: float32, rounded once; bit for bit the reference.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_lm.ops.formats import EMPTY_GROUP, TILE, HiddenGradients, Sparse24, SparseVenom
from sparse_lm.ops.triton import packed_24
from sparse_lm.ops.triton.gluon_call import align_rows, gluon_call
from sparse_lm.ops.triton.sparsify_24 import outputs
from sparse_lm.ops.triton.tiles import (
    GROUPS,
    GROUPS_LAYOUT,
    TILE_LAYOUT,
    WARPS,
    WORDS,
    WORDS_LAYOUT,
    as_words,
    load_pairs,
    load_words,
    store_metadata,
    store_words,
)
from sparse_lm.ops.triton.two_of_four import members, pack_halves, spread, unpack_words

_TILE = gl.constexpr(TILE)
_EMPTY_WORD = EMPTY_GROUP * 0x11111111


@gluon.jit
def _differentiate_tile(
    dy, values, metadata, dh, row_tile, tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr
):
    """Stores dH's values; the transposes of dH and of Y in the tile, dense, in the halves of [64, 64] words."""
    dtype: gl.constexpr = dh.dtype.element_ty
    low, high = load_pairs(dy, row_tile, tile, ROWS, COLUMNS)
    words = gl.load(metadata + (row_tile * TILES + tile) * WORDS + gl.arange(0, WORDS, WORDS_LAYOUT))
    nibble = gl.convert_layout(unpack_words(words), GROUPS_LAYOUT, assert_trivial=True)
    y = load_words(values, row_tile, tile, TILES)
    first_y, second_y = packed_24.unpack(y, dtype)
    first, second = packed_24.unpack(packed_24.take_two(low, high, nibble), dtype)
    kept = packed_24.pack(first * (2.0 * gl.sqrt_rn(first_y)), second * (2.0 * gl.sqrt_rn(second_y)), dtype)
    store_words(kept, dh, row_tile, tile, TILES)
    both = spread(*packed_24.zip_halves(kept, y), nibble)
    return gl.convert_layout(both.permute([1, 0]), TILE_LAYOUT)  # by way of shared memory


@gluon.jit
def _select_along_tokens(both):
    """Of words [64 neurons, 64 tokens] of dH and Y: survivors of dH and their nibbles, and those of Y."""
    a, b, c, d = members(both)
    dh, dh_nibble = packed_24.two_of_four_low(a, b, c, d, True)
    y, y_nibble = packed_24.two_of_four_high(a, b, c, d, False)
    return dh, dh_nibble, y, y_nibble


@gluon.jit
def _gradients_24_kernel(
    dy,
    values,
    metadata,
    dh,
    dh_t,
    dh_t_metadata,
    y_t,
    y_t_metadata,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    ROW_TILES: gl.constexpr,
):
    row_tile, tile = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    both = _differentiate_tile(dy, values, metadata, dh, row_tile, tile, ROWS, COLUMNS, TILES)
    dh_kept, dh_nibble, y_kept, y_nibble = _select_along_tokens(both)
    _store_rows(dh_kept, dh_nibble, dh_t, dh_t_metadata, tile, row_tile, ROW_TILES)
    _store_rows(y_kept, y_nibble, y_t, y_t_metadata, tile, row_tile, ROW_TILES)


@gluon.jit
def _store_rows(kept, nibble, values, metadata, row_tile, k_tile, K_TILES: gl.constexpr):
    store_words(gl.convert_layout(kept, GROUPS_LAYOUT, assert_trivial=True), values, row_tile, k_tile, K_TILES)
    store_metadata(nibble, metadata, row_tile, k_tile, K_TILES)


@gluon.jit
def _scatter_rows(kept, nibble, listed, row_tile, values, metadata, NEURONS: gl.constexpr, ROW_TILES: gl.constexpr):
    """Stores rows of survivors [64 neurons, 16 words] and their metadata where `listed` says, if there are any."""
    neuron = gl.load(listed + gl.arange(0, _TILE, gl.SliceLayout(1, GROUPS_LAYOUT)))[:, None]
    column = row_tile * GROUPS + gl.arange(0, GROUPS, gl.SliceLayout(0, GROUPS_LAYOUT))[None, :]
    kept = gl.convert_layout(kept, GROUPS_LAYOUT, assert_trivial=True)
    gl.store(as_words(values) + neuron.to(gl.int64) * (ROW_TILES * GROUPS) + column, kept, mask=neuron < NEURONS)
    # Words have halves of two rows, of which another thread block may store the other: the halves are stored apart.
    halves = pack_halves(nibble)
    layout: gl.constexpr = halves.type.layout
    neuron = gl.load(listed + gl.arange(0, _TILE, gl.SliceLayout(1, layout)))[:, None]
    word = neuron % _TILE // 16 * 32 + neuron % 8 * 4 + gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]
    offset = (neuron // _TILE * ROW_TILES + row_tile) * (2 * WORDS) + 2 * word + neuron % 16 // 8
    gl.store(metadata.to(gl.pointer_type(gl.int16)) + offset, halves.to(gl.int16), mask=neuron < NEURONS)


@gluon.jit
def _gradients_venom_kernel(
    dy,
    values,
    metadata,
    columns,
    empty_values,
    empty_words,
    also_empty_values,
    also_empty_words,
    dh,
    dh_t,
    dh_t_metadata,
    y_t,
    y_t_metadata,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    ROW_TILES: gl.constexpr,
    NEURONS: gl.constexpr,
    BLOCK_TILES: gl.constexpr,
):
    row_tile, tile = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    both = _differentiate_tile(dy, values, metadata, dh, row_tile, tile, ROWS, COLUMNS, TILES)
    listed = columns + (row_tile // BLOCK_TILES * TILES + tile) * _TILE
    if row_tile < ROW_TILES:  # a ragged last block is padded by more than a tile
        dh_kept, dh_nibble, y_kept, y_nibble = _select_along_tokens(both)
        _scatter_rows(dh_kept, dh_nibble, listed, row_tile, dh_t, dh_t_metadata, NEURONS, ROW_TILES)
        _scatter_rows(y_kept, y_nibble, listed, row_tile, y_t, y_t_metadata, NEURONS, ROW_TILES)


def squared_relu_gradients(dy: Array, y: Sparse24 | SparseVenom) -> HiddenGradients:
    """See `sparse_lm.ops.squared_relu_gradients`.

    Raises:
      NotImplementedError: dy or y is not of 16-bit floats of one dtype, or v of a Venom y is no multiple of 64.
    """
    if dy.dtype not in (jnp.bfloat16, jnp.float16) or y.dtype != dy.dtype:
        raise NotImplementedError(f"needs dY and Y in bfloat16 or in float16, not {dy.dtype} and {y.dtype}")
    venom = isinstance(y, SparseVenom)
    if venom and y.v % TILE:
        raise NotImplementedError(f"needs v to be a multiple of {TILE}, not {y.v}")
    tokens, neurons = y.shape
    stored_row_tiles, tiles, _ = y.metadata.shape
    transpose = outputs((neurons, tokens), dy.dtype)
    padded = align_rows(dy)
    constants = dict(ROWS=padded.shape[0], COLUMNS=padded.shape[1], TILES=tiles, ROW_TILES=transpose[1].shape[1])
    options = dict(
        out=(jax.ShapeDtypeStruct(y.values.shape, dy.dtype), *transpose, *transpose),
        blocks=stored_row_tiles * tiles,
        warps=WARPS,
    )
    if venom:
        empty = jnp.zeros(transpose[0].shape, dy.dtype), jnp.full(transpose[1].shape, _EMPTY_WORD, jnp.int32)
        dh, *transposes = gluon_call(
            _gradients_venom_kernel,
            padded,
            y.values,
            y.metadata,
            y.columns,
            *empty,
            *empty,
            constants=constants | dict(NEURONS=neurons, BLOCK_TILES=y.v // TILE),
            aliases={4: 1, 5: 2, 6: 3, 7: 4},
            **options,
        )
    else:
        dh, *transposes = gluon_call(_gradients_24_kernel, padded, y.values, y.metadata, constants=constants, **options)
    dh_t, y_t = (Sparse24(*transposes[i : i + 2], (neurons, tokens)) for i in (0, 2))
    return HiddenGradients(dataclasses.replace(y, values=dh), dh_t, y_t)
