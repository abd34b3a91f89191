"""Computes dH = 2 sqrt(Y) dY where Y is stored, and the 2:4 forms of the transposes of dH and Y, in one pass.

A thread block takes 64 tokens of 64 (condensed) columns, and of each four tokens keeps the two largest, or draws two.
Of a Venom Y the transposes have a row for every neuron: a thread block stores those of its 16 groups, the rows of kept
ones where they belong and empty rows elsewhere.

Numerics: float32, rounded once, of correctly rounded square roots: bit for bit the reference on a CPU. XLA on a GPU
and `hopper` take approximate roots, which a few float16 values show.
"""

from __future__ import annotations

import dataclasses
import math

import jax
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_lm.ops.checks import check_hidden_dtype
from sparse_lm.ops.formats import EMPTY_GROUP, TILE, HiddenGradients, Sparse24, SparseVenom, types_24
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
    indices,
    load_pairs,
    locate_survivors,
    store_sparse,
)
from sparse_lm.ops.triton.frame.two_of_four import members, pack_halves, spread, unpack_words
from sparse_lm.ops.triton.passes.sparsify_24 import NO_KEY

_TILE = gl.constexpr(TILE)
_DH, _Y = gl.constexpr(0), gl.constexpr(1)  # halves of a word
_EMPTY_HALF = gl.constexpr(EMPTY_GROUP * 0x1111)


@gluon.jit
def _keep_along_tokens(both, above_one, HALF: gl.constexpr, dtype: gl.constexpr):
    """Selects survivors and nibbles of the low (0) or the high (1) halves of words [64 neurons, 64 tokens].

    The two largest of each four, or, with random numbers of `mvue.uniform_above_one`, two drawn at random.
    """
    a, b, c, d = members(both)
    if above_one is None:
        kept, nibble = packed_24.two_of_four(a, b, c, d, SIGNED=HALF == _DH, HIGH=HALF == _Y)
    else:
        a, b = packed_24.unpack(a, dtype)[HALF], packed_24.unpack(b, dtype)[HALF]
        c, d = packed_24.unpack(c, dtype)[HALF], packed_24.unpack(d, dtype)[HALF]
        low, high, nibble = mvue.sample_two(a, b, c, d, above_one)
        kept = packed_24.pack(low, high, dtype)
    return kept, nibble


@gluon.jit
def _store_rows(rows, neuron, inside, array, row_tile, ROW_TILES: gl.constexpr):
    """Stores rows of a tile of tokens where neurons [64, 1] are.

    Rows are of survivors, words [64, 16], or of metadata, halves of words [64, 4]: the other half may be that of a row
    that another thread block stores.
    """
    if rows.shape[1] == GROUPS:
        column = row_tile * GROUPS + indices(GROUPS, GROUPS_LAYOUT, 1)
        gl.store(as_words(array) + neuron.to(gl.int64) * (ROW_TILES * GROUPS) + column, rows, mask=inside)
    else:
        place = neuron % _TILE // 16 * 32 + neuron % 8 * 4 + indices(4, HALVES_LAYOUT, 1)
        offset = (neuron // _TILE * ROW_TILES + row_tile) * (2 * WORDS) + 2 * place + neuron % 16 // 8
        gl.store(array.to(gl.pointer_type(gl.int16)) + offset, rows.to(gl.int16), mask=inside)


@gluon.jit
def _scatter_rows(kept, nibble, listed, row_tile, values, metadata, NEURONS: gl.constexpr, ROW_TILES: gl.constexpr):
    """Stores rows of survivors [64, 16] and their metadata where `listed` says, if there are such rows."""
    neuron = gl.load(listed + gl.arange(0, _TILE, gl.SliceLayout(1, GROUPS_LAYOUT)))[:, None]
    kept = gl.convert_layout(kept, GROUPS_LAYOUT, assert_trivial=True)
    _store_rows(kept, neuron, neuron < NEURONS, values, row_tile, ROW_TILES)
    neuron = gl.load(listed + gl.arange(0, _TILE, gl.SliceLayout(1, HALVES_LAYOUT)))[:, None]
    halves = gl.convert_layout(pack_halves(nibble), HALVES_LAYOUT, assert_trivial=True)
    _store_rows(halves, neuron, neuron < NEURONS, metadata, row_tile, ROW_TILES)


@gluon.jit
def _not_listed(listed, neuron, first, M: gl.constexpr, NEURONS: gl.constexpr):
    """Returns true for rows of the transposes that exist and are not listed, of groups from neuron `first` on."""
    group = listed + (neuron - first) // M * 4
    missing = (gl.load(group) != neuron) & (gl.load(group + 1) != neuron)
    missing = missing & (gl.load(group + 2) != neuron) & (gl.load(group + 3) != neuron)
    return (neuron < (NEURONS + _TILE - 1) // _TILE * _TILE) & (missing | (neuron >= NEURONS))


@gluon.jit
def squared_relu_gradients_kernel(
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
    NEURONS: gl.constexpr,
    M: gl.constexpr,
    BLOCK_TILES: gl.constexpr,
    DRAW: gl.constexpr,
):
    """Differentiates a tile of Y, a 2:4 one if `columns`, M and BLOCK_TILES are None. It reads the key if DRAW."""
    dtype: gl.constexpr = dh.dtype.element_ty
    ROW_TILES: gl.constexpr = (ROWS + _TILE - 1) // _TILE
    TILES: gl.constexpr = (COLUMNS + _TILE - 1) // _TILE
    row_tile, tile = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    low, high = load_pairs(dy, row_tile, tile, ROWS, COLUMNS)
    words = gl.load(metadata + (row_tile * TILES + tile) * WORDS + gl.arange(0, WORDS, WORDS_LAYOUT))
    nibble = gl.convert_layout(unpack_words(words), GROUPS_LAYOUT, assert_trivial=True)
    y = gl.load(locate_survivors(values, row_tile, tile, TILES))
    first_y, second_y = packed_24.unpack(y, dtype)
    first, second = packed_24.unpack(packed_24.take_two(low, high, nibble), dtype)
    kept = packed_24.pack(first * (2.0 * gl.sqrt_rn(first_y)), second * (2.0 * gl.sqrt_rn(second_y)), dtype)
    gl.store(locate_survivors(dh, row_tile, tile, TILES), kept)
    # The transposes of dH and of Y, dense, in the halves of [64, 64] words, by way of shared memory.
    both = gl.convert_layout(spread(*packed_24.zip_halves(kept, y), nibble).permute([1, 0]), TILE_LAYOUT)

    if columns is not None:
        listed = columns + (row_tile // BLOCK_TILES * TILES + tile) * _TILE
    if columns is None or row_tile < ROW_TILES:  # a ragged last block is padded by more than a tile
        above_one = None
        if DRAW:
            row = gl.arange(0, _TILE, gl.SliceLayout(1, PAIRED_GROUPS_LAYOUT))
            row = tile * _TILE + row if columns is None else gl.load(listed + row)
            PADDED_NEURONS: gl.constexpr = (NEURONS + _TILE - 1) // _TILE * _TILE
            above_one = mvue.uniform_above_one(key, row[:, None], row_tile, 1, PADDED_NEURONS)
        dh_kept, dh_nibble = _keep_along_tokens(both, above_one, _DH, dtype)
        y_kept, y_nibble = _keep_along_tokens(both, above_one, _Y, dtype)
        if columns is None:
            store_sparse(dh_kept, dh_nibble, dh_t, dh_t_metadata, tile, row_tile, ROW_TILES)
            store_sparse(y_kept, y_nibble, y_t, y_t_metadata, tile, row_tile, ROW_TILES)
        else:
            _scatter_rows(dh_kept, dh_nibble, listed, row_tile, dh_t, dh_t_metadata, NEURONS, ROW_TILES)
            _scatter_rows(y_kept, y_nibble, listed, row_tile, y_t, y_t_metadata, NEURONS, ROW_TILES)
            # Empty groups in the rows that the tile's lists leave out.
            nothing = gl.full([_TILE, GROUPS], 0, gl.int32, GROUPS_LAYOUT)
            empty = gl.full([_TILE, 4], _EMPTY_HALF, gl.int32, HALVES_LAYOUT)
            first_neuron = tile * (GROUPS * M)
            for start in range(0, GROUPS * M, _TILE):
                neuron = first_neuron + start + indices(_TILE, GROUPS_LAYOUT, 0)
                clear = _not_listed(listed, neuron, first_neuron, M, NEURONS)
                _store_rows(nothing, neuron, clear, dh_t, row_tile, ROW_TILES)
                _store_rows(nothing, neuron, clear, y_t, row_tile, ROW_TILES)
                neuron = first_neuron + start + indices(_TILE, HALVES_LAYOUT, 0)
                clear = _not_listed(listed, neuron, first_neuron, M, NEURONS)
                _store_rows(empty, neuron, clear, dh_t_metadata, row_tile, ROW_TILES)
                _store_rows(empty, neuron, clear, y_t_metadata, row_tile, ROW_TILES)


def squared_relu_gradients(dy: Array, y: Sparse24 | SparseVenom, *, key: Array | None = None) -> HiddenGradients:
    """See `sparse_lm.ops.squared_relu_gradients`.

    It refuses dy and y that are not of 16-bit floats of one dtype; of a Venom y, a v that is no multiple of 64, and
    contiguous columns; and a key of another generator than JAX's default one.
    """
    check_hidden_dtype(dy.dtype, y.dtype)
    venom = isinstance(y, SparseVenom)
    if venom and (y.v % TILE or y.contiguous > 1):
        raise NotImplementedError(
            f"needs v to be a multiple of {TILE} and columns not to be contiguous, not {y.v} and {y.contiguous}"
        )
    tokens, neurons = y.shape
    transpose = types_24(neurons, tokens, dy.dtype)
    padded = align_rows(dy)
    dh, *transposes = gluon_call(
        squared_relu_gradients_kernel,
        *(padded, y.values, y.metadata, y.columns if venom else None, NO_KEY if key is None else threefry_key(key)),
        out=(jax.ShapeDtypeStruct(y.values.shape, dy.dtype), *transpose, *transpose),
        blocks=math.prod(y.metadata.shape[:2]),
        warps=WARPS,
        constants=dict(
            ROWS=padded.shape[0],
            COLUMNS=padded.shape[1],
            NEURONS=neurons,
            M=y.m if venom else None,
            BLOCK_TILES=y.v // TILE if venom else None,
            DRAW=key is not None,
        ),
    )
    dh_t, y_t = (Sparse24(*transposes[i : i + 2], (neurons, tokens)) for i in (0, 2))
    return HiddenGradients(dataclasses.replace(y, values=dh), dh_t, y_t)
