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
from sparse_lm.ops.triton.gluon_call import gluon_call
from sparse_lm.ops.triton.sparsify_24 import outputs
from sparse_lm.ops.triton.tiles import (
    KEPT,
    PAIRS_LAYOUT,
    TILE_LAYOUT,
    WARPS,
    WORDS,
    WORDS_LAYOUT,
    load_tile,
    offsets,
    store_pairs,
    store_sparse,
)
from sparse_lm.ops.triton.two_of_four import (
    at_positions,
    interleave,
    members,
    pack_halves,
    spread,
    two_of_four,
    unpack_words,
)

_TILE = gl.constexpr(TILE)
_EMPTY_WORD = EMPTY_GROUP * 0x11111111


@gluon.jit
def _differentiate_tile(
    dy, values, metadata, dh, row_tile, tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr
):
    """Stores dH's values; the transposes of dH and of Y in the tile, dense."""
    a, b, c, d = members(load_tile(dy, row_tile, tile, ROWS, COLUMNS, TILE_LAYOUT))
    groups: gl.constexpr = a.type.layout
    words = gl.load(metadata + (row_tile * TILES + tile) * WORDS + gl.arange(0, WORDS, WORDS_LAYOUT))
    nibble = gl.convert_layout(unpack_words(words), groups, assert_trivial=True)
    _, _, offset = offsets(row_tile, tile, TILES * KEPT, KEPT, PAIRS_LAYOUT)
    y_low, y_high = gl.split(gl.load(values + offset).to(gl.float32).reshape([_TILE, KEPT // 2, 2]))
    y_low = gl.convert_layout(y_low, groups, assert_trivial=True)
    y_high = gl.convert_layout(y_high, groups, assert_trivial=True)
    low, high = at_positions(a, b, c, d, nibble)
    low, high = low * (2.0 * gl.sqrt_rn(y_low)), high * (2.0 * gl.sqrt_rn(y_high))
    dtype: gl.constexpr = dh.dtype.element_ty
    low, high = low.to(dtype).to(gl.float32), high.to(dtype).to(gl.float32)
    store_pairs(low, high, dh, row_tile, tile, TILES)
    return _transpose(spread(low, high, nibble), dtype), _transpose(spread(y_low, y_high, nibble), dtype)


@gluon.jit
def _transpose(tile, dtype: gl.constexpr):
    """By way of shared memory, in the 16 bits that the numbers have."""
    return gl.convert_layout(tile.to(dtype).permute([1, 0]), TILE_LAYOUT).to(gl.float32)


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
    dense_dh, dense_y = _differentiate_tile(dy, values, metadata, dh, row_tile, tile, ROWS, COLUMNS, TILES)
    low, high, nibble = two_of_four(dense_dh, False)
    store_sparse(low, high, nibble, dh_t, dh_t_metadata, tile, row_tile, ROW_TILES)
    low, high, nibble = two_of_four(dense_y, False)
    store_sparse(low, high, nibble, y_t, y_t_metadata, tile, row_tile, ROW_TILES)


@gluon.jit
def _scatter_rows(dense, listed, row_tile, values, metadata, NEURONS: gl.constexpr, ROW_TILES: gl.constexpr):
    """Selects along tokens in [64 neurons, 64 tokens] and stores the rows where `listed` says, if there are any."""
    low, high, nibble = two_of_four(dense, False)
    neuron = gl.load(listed + gl.arange(0, _TILE, gl.SliceLayout(1, PAIRS_LAYOUT)))[:, None]
    column = row_tile * KEPT + gl.arange(0, KEPT, gl.SliceLayout(0, PAIRS_LAYOUT))[None, :]
    pairs = gl.convert_layout(interleave(low, high).to(values.dtype.element_ty), PAIRS_LAYOUT, assert_trivial=True)
    gl.store(values + neuron.to(gl.int64) * (ROW_TILES * KEPT) + column, pairs, mask=neuron < NEURONS)
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
    dense_dh, dense_y = _differentiate_tile(dy, values, metadata, dh, row_tile, tile, ROWS, COLUMNS, TILES)
    listed = columns + (row_tile // BLOCK_TILES * TILES + tile) * _TILE
    if row_tile < ROW_TILES:  # a ragged last block is padded by more than a tile
        _scatter_rows(dense_dh, listed, row_tile, dh_t, dh_t_metadata, NEURONS, ROW_TILES)
        _scatter_rows(dense_y, listed, row_tile, y_t, y_t_metadata, NEURONS, ROW_TILES)


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
    constants = dict(ROWS=dy.shape[0], COLUMNS=dy.shape[1], TILES=tiles, ROW_TILES=transpose[1].shape[1])
    options = dict(
        out=(jax.ShapeDtypeStruct(y.values.shape, dy.dtype), *transpose, *transpose),
        blocks=stored_row_tiles * tiles,
        warps=WARPS,
    )
    if venom:
        empty = jnp.zeros(transpose[0].shape, dy.dtype), jnp.full(transpose[1].shape, _EMPTY_WORD, jnp.int32)
        dh, *transposes = gluon_call(
            _gradients_venom_kernel,
            dy,
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
        dh, *transposes = gluon_call(_gradients_24_kernel, dy, y.values, y.metadata, constants=constants, **options)
    dh_t, y_t = (Sparse24(*transposes[i : i + 2], (neurons, tokens)) for i in (0, 2))
    return HiddenGradients(dataclasses.replace(y, values=dh), dh_t, y_t)
