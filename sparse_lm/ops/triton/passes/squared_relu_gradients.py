"""Computes dH = 2 sqrt(Y) dY where Y is stored, and the 2:4 forms of the transposes of dH and Y, in one pass.

A thread block takes 64 tokens of 64 (condensed) columns, and of each four tokens keeps the two largest, or draws two.
Of a Venom Y the transposes have a row for every neuron: a thread block stores those of its 16 groups, the rows of kept
ones where they belong and empty rows elsewhere.

Numerics: float32, rounded once, of correctly rounded square roots: bit for bit the reference on a CPU. XLA on a GPU
and `hopper` take approximate roots, which a few float16 values show.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_lm.ops.formats import EMPTY_GROUP, TILE, HiddenGradients, Sparse24, SparseVenom
from sparse_lm.ops.mvue import threefry_key
from sparse_lm.ops.triton.frame import mvue, packed_24
from sparse_lm.ops.triton.frame.gluon_call import align_rows, gluon_call
from sparse_lm.ops.triton.frame.tiles import (
    GROUPS,
    GROUPS_LAYOUT,
    HALVES_LAYOUT,
    PAIRED_GROUPS_LAYOUT,
    TILE_LAYOUT,
    WARPS,
    WORDS,
    WORDS_LAYOUT,
    as_words,
    load_pairs,
    load_survivors,
    store_metadata,
    store_survivors,
)
from sparse_lm.ops.triton.frame.two_of_four import members, pack_halves, spread, unpack_words
from sparse_lm.ops.triton.passes.sparsify_24 import NO_KEY, outputs

_TILE = gl.constexpr(TILE)
_DH, _Y = gl.constexpr(0), gl.constexpr(1)  # halves of a word
_EMPTY_HALF = gl.constexpr(EMPTY_GROUP * 0x1111)


@gluon.jit
def _differentiate_tile(
    dy, values, metadata, dh, row_tile, tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr
):
    """Stores dH's values; the transposes of dH and of Y in the tile, dense, in the halves of [64, 64] words."""
    dtype: gl.constexpr = dh.dtype.element_ty
    low, high = load_pairs(dy, row_tile, tile, ROWS, COLUMNS)
    words = gl.load(metadata + (row_tile * TILES + tile) * WORDS + gl.arange(0, WORDS, WORDS_LAYOUT))
    nibble = gl.convert_layout(unpack_words(words), GROUPS_LAYOUT, assert_trivial=True)
    y = load_survivors(values, row_tile, tile, TILES)
    first_y, second_y = packed_24.unpack(y, dtype)
    first, second = packed_24.unpack(packed_24.take_two(low, high, nibble), dtype)
    kept = packed_24.pack(first * (2.0 * gl.sqrt_rn(first_y)), second * (2.0 * gl.sqrt_rn(second_y)), dtype)
    store_survivors(kept, dh, row_tile, tile, TILES)
    both = spread(*packed_24.zip_halves(kept, y), nibble)
    return gl.convert_layout(both.permute([1, 0]), TILE_LAYOUT)  # by way of shared memory


@gluon.jit
def _keep_along_tokens(both, above_one, HALF: gl.constexpr, dtype: gl.constexpr):
    """Selects survivors and nibbles of the low (0) or the high (1) halves of words [64 neurons, 64 tokens].

    The two largest of each four, or, with random numbers of `mvue.uniform_above_one`, two drawn at random.
    """
    a, b, c, d = members(both)
    if above_one is None:
        kept, nibble = packed_24.two_of_four_halves(a, b, c, d, HIGH=HALF == _Y, SIGNED=HALF == _DH)
    else:
        a, b = packed_24.unpack(a, dtype)[HALF], packed_24.unpack(b, dtype)[HALF]
        c, d = packed_24.unpack(c, dtype)[HALF], packed_24.unpack(d, dtype)[HALF]
        low, high, nibble = mvue.sample_two(a, b, c, d, above_one)
        kept = packed_24.pack(low, high, dtype)
    return kept, nibble


@gluon.jit
def _gradients_24_kernel(
    dy,
    values,
    metadata,
    key,
    dh,
    dh_t,
    dh_t_metadata,
    y_t,
    y_t_metadata,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    ROW_TILES: gl.constexpr,
    DRAW: gl.constexpr,
):
    row_tile, tile = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    both = _differentiate_tile(dy, values, metadata, dh, row_tile, tile, ROWS, COLUMNS, TILES)
    above_one = None
    if DRAW:
        neuron = tile * _TILE + gl.arange(0, _TILE, gl.SliceLayout(1, PAIRED_GROUPS_LAYOUT))[:, None]
        above_one = mvue.uniform_above_one(key, neuron, row_tile, 1, TILES * _TILE)
    dh_kept, dh_nibble = _keep_along_tokens(both, above_one, _DH, dh.dtype.element_ty)
    y_kept, y_nibble = _keep_along_tokens(both, above_one, _Y, dh.dtype.element_ty)
    _store_rows(dh_kept, dh_nibble, dh_t, dh_t_metadata, tile, row_tile, ROW_TILES)
    _store_rows(y_kept, y_nibble, y_t, y_t_metadata, tile, row_tile, ROW_TILES)


@gluon.jit
def _store_rows(kept, nibble, values, metadata, row_tile, k_tile, K_TILES: gl.constexpr):
    store_survivors(gl.convert_layout(kept, GROUPS_LAYOUT, assert_trivial=True), values, row_tile, k_tile, K_TILES)
    store_metadata(nibble, metadata, row_tile, k_tile, K_TILES)


@gluon.jit
def _store_listed(words, neuron, inside, values, row_tile, ROW_TILES: gl.constexpr):
    """Stores survivors of a tile of tokens, words [64, 16], in the rows of neurons [64, 1]."""
    column = row_tile * GROUPS + gl.arange(0, GROUPS, gl.SliceLayout(0, GROUPS_LAYOUT))[None, :]
    gl.store(as_words(values) + neuron.to(gl.int64) * (ROW_TILES * GROUPS) + column, words, mask=inside)


@gluon.jit
def _store_listed_metadata(halves, neuron, inside, metadata, row_tile, ROW_TILES: gl.constexpr):
    """Halves of words [64, 4]: the other half may be that of a row that another thread block stores."""
    place = neuron % _TILE // 16 * 32 + neuron % 8 * 4 + gl.arange(0, 4, gl.SliceLayout(0, HALVES_LAYOUT))[None, :]
    offset = (neuron // _TILE * ROW_TILES + row_tile) * (2 * WORDS) + 2 * place + neuron % 16 // 8
    gl.store(metadata.to(gl.pointer_type(gl.int16)) + offset, halves.to(gl.int16), mask=inside)


@gluon.jit
def _scatter_rows(kept, nibble, listed, row_tile, values, metadata, NEURONS: gl.constexpr, ROW_TILES: gl.constexpr):
    """Stores rows of survivors [64, 16] and their metadata where `listed` says, if there are such rows."""
    neuron = gl.load(listed + gl.arange(0, _TILE, gl.SliceLayout(1, GROUPS_LAYOUT)))[:, None]
    kept = gl.convert_layout(kept, GROUPS_LAYOUT, assert_trivial=True)
    _store_listed(kept, neuron, neuron < NEURONS, values, row_tile, ROW_TILES)
    neuron = gl.load(listed + gl.arange(0, _TILE, gl.SliceLayout(1, HALVES_LAYOUT)))[:, None]
    halves = gl.convert_layout(pack_halves(nibble), HALVES_LAYOUT, assert_trivial=True)
    _store_listed_metadata(halves, neuron, neuron < NEURONS, metadata, row_tile, ROW_TILES)


@gluon.jit
def _not_listed(listed, neuron, first, M: gl.constexpr, NEURONS: gl.constexpr, ROWS: gl.constexpr):
    """Returns true for rows of the transposes that are there and not listed, of a tile of groups from neuron `first`
    on."""
    group = listed + (neuron - first) // M * 4
    missing = (gl.load(group) != neuron) & (gl.load(group + 1) != neuron)
    missing = missing & (gl.load(group + 2) != neuron) & (gl.load(group + 3) != neuron)
    return (neuron < ROWS) & (missing | (neuron >= NEURONS))


@gluon.jit
def _clear_rows(
    listed,
    tile,
    row_tile,
    dh_t,
    dh_t_metadata,
    y_t,
    y_t_metadata,
    M: gl.constexpr,
    NEURONS: gl.constexpr,
    ROW_TILES: gl.constexpr,
):
    """Stores empty groups in the rows that a tile's lists leave out."""
    rows: gl.constexpr = (NEURONS + _TILE - 1) // _TILE * _TILE
    nothing = gl.full([_TILE, GROUPS], 0, gl.int32, GROUPS_LAYOUT)
    empty = gl.full([_TILE, 4], _EMPTY_HALF, gl.int32, HALVES_LAYOUT)
    first = tile * (GROUPS * M)
    for start in range(0, GROUPS * M, _TILE):
        neuron = first + start + gl.arange(0, _TILE, gl.SliceLayout(1, GROUPS_LAYOUT))[:, None]
        clear = _not_listed(listed, neuron, first, M, NEURONS, rows)
        _store_listed(nothing, neuron, clear, dh_t, row_tile, ROW_TILES)
        _store_listed(nothing, neuron, clear, y_t, row_tile, ROW_TILES)
        neuron = first + start + gl.arange(0, _TILE, gl.SliceLayout(1, HALVES_LAYOUT))[:, None]
        clear = _not_listed(listed, neuron, first, M, NEURONS, rows)
        _store_listed_metadata(empty, neuron, clear, dh_t_metadata, row_tile, ROW_TILES)
        _store_listed_metadata(empty, neuron, clear, y_t_metadata, row_tile, ROW_TILES)


@gluon.jit
def _gradients_venom_kernel(
    dy,
    values,
    metadata,
    columns,
    key,
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
    M: gl.constexpr,
    BLOCK_TILES: gl.constexpr,
    DRAW: gl.constexpr,
):
    row_tile, tile = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    both = _differentiate_tile(dy, values, metadata, dh, row_tile, tile, ROWS, COLUMNS, TILES)
    listed = columns + (row_tile // BLOCK_TILES * TILES + tile) * _TILE
    if row_tile < ROW_TILES:  # a ragged last block is padded by more than a tile
        above_one = None
        if DRAW:
            PADDED_NEURONS: gl.constexpr = (NEURONS + _TILE - 1) // _TILE * _TILE
            neuron = gl.load(listed + gl.arange(0, _TILE, gl.SliceLayout(1, PAIRED_GROUPS_LAYOUT)))[:, None]
            above_one = mvue.uniform_above_one(key, neuron, row_tile, 1, PADDED_NEURONS)
        dh_kept, dh_nibble = _keep_along_tokens(both, above_one, _DH, dh.dtype.element_ty)
        y_kept, y_nibble = _keep_along_tokens(both, above_one, _Y, dh.dtype.element_ty)
        _scatter_rows(dh_kept, dh_nibble, listed, row_tile, dh_t, dh_t_metadata, NEURONS, ROW_TILES)
        _scatter_rows(y_kept, y_nibble, listed, row_tile, y_t, y_t_metadata, NEURONS, ROW_TILES)
        _clear_rows(listed, tile, row_tile, dh_t, dh_t_metadata, y_t, y_t_metadata, M, NEURONS, ROW_TILES)


def squared_relu_gradients(dy: Array, y: Sparse24 | SparseVenom, *, key: Array | None = None) -> HiddenGradients:
    """See `sparse_lm.ops.squared_relu_gradients`.

    Raises:
      NotImplementedError: dy or y is not of 16-bit floats of one dtype; or of a Venom y, v is no multiple of 64, or
        columns are contiguous; or a key of another generator than JAX's default one.
    """
    if dy.dtype not in (jnp.bfloat16, jnp.float16) or y.dtype != dy.dtype:
        raise NotImplementedError(f"needs dY and Y in bfloat16 or in float16, not {dy.dtype} and {y.dtype}")
    venom = isinstance(y, SparseVenom)
    if venom and (y.v % TILE or y.contiguous > 1):
        raise NotImplementedError(
            f"needs v to be a multiple of {TILE} and columns not to be contiguous, not {y.v} and {y.contiguous}"
        )
    tokens, neurons = y.shape
    stored_row_tiles, tiles, _ = y.metadata.shape
    transpose = outputs((neurons, tokens), dy.dtype)
    padded = align_rows(dy)
    constants = dict(
        ROWS=padded.shape[0],
        COLUMNS=padded.shape[1],
        TILES=tiles,
        ROW_TILES=transpose[1].shape[1],
        DRAW=key is not None,
    )
    key = NO_KEY if key is None else threefry_key(key)
    if venom:
        kernel, operands = _gradients_venom_kernel, (padded, y.values, y.metadata, y.columns, key)
        constants |= dict(NEURONS=neurons, M=y.m, BLOCK_TILES=y.v // TILE)
    else:
        kernel, operands = _gradients_24_kernel, (padded, y.values, y.metadata, key)
    dh, *transposes = gluon_call(
        kernel,
        *operands,
        out=(jax.ShapeDtypeStruct(y.values.shape, dy.dtype), *transpose, *transpose),
        blocks=stored_row_tiles * tiles,
        warps=WARPS,
        constants=constants,
    )
    dh_t, y_t = (Sparse24(*transposes[i : i + 2], (neurons, tokens)) for i in (0, 2))
    return HiddenGradients(dataclasses.replace(y, values=dh), dh_t, y_t)
