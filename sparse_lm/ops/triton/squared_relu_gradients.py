"""dH = 2 sqrt(Y) dY where Y is stored, and the 2:4 forms of the transposes of dH and Y, in one pass.

A thread block takes 64 tokens of 64 (condensed) columns. Of a Venom Y the transposes have a row for every neuron:
those of the kept ones are scattered over matrices of empty groups.

Numerics: float32, rounded once; bit for bit the reference.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl
from jax import Array

from sparse_lm.ops.formats import EMPTY_GROUP, TILE, HiddenGradients, Sparse24, SparseVenom
from sparse_lm.ops.triton import device
from sparse_lm.ops.triton.sparsify_24 import load_tile, store_pairs, store_words
from sparse_lm.ops.triton.two_of_four import (
    at_positions,
    interleave,
    pack_halves,
    spread,
    two_of_four,
    unpack_words,
)

_TILE = tl.constexpr(TILE)
_KEPT = tl.constexpr(TILE // 2)
_WORDS = tl.constexpr(2 * TILE)
_EMPTY_WORD = EMPTY_GROUP * 0x11111111


@triton.jit
def _differentiate_tile(
    dy, values, metadata, dh, row_tile, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr
):
    """Stores dH's values; dH and Y of the tile, dense."""
    nibble = unpack_words(tl.load(metadata + (row_tile * TILES + tile) * _WORDS + tl.arange(0, _WORDS)))
    row = row_tile * _TILE + tl.arange(0, _TILE)[:, None]
    column = tile * _KEPT + tl.arange(0, _KEPT)[None, :]
    pairs = tl.load(values + row.to(tl.int64) * (TILES * _KEPT) + column).to(tl.float32)
    y_low, y_high = tl.split(pairs.reshape([_TILE, _KEPT // 2, 2]))
    low, high = at_positions(load_tile(dy, row_tile, tile, ROWS, COLUMNS), nibble)
    low, high = low * (2.0 * tl.sqrt_rn(y_low)), high * (2.0 * tl.sqrt_rn(y_high))
    dtype: tl.constexpr = dh.dtype.element_ty
    low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    store_pairs(low, high, dh, row_tile, tile, TILES)
    return spread(low, high, nibble), spread(y_low, y_high, nibble)


@triton.jit
def _gradients_24_kernel(
    dy,
    values,
    metadata,
    dh,
    dh_t,
    dh_t_metadata,
    y_t,
    y_t_metadata,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    ROW_TILES: tl.constexpr,
):
    tile, row_tile = tl.program_id(0), tl.program_id(1)
    dense_dh, dense_y = _differentiate_tile(dy, values, metadata, dh, row_tile, tile, ROWS, COLUMNS, TILES)
    low, high, nibble = two_of_four(dense_dh.permute([1, 0]), False)
    store_pairs(low, high, dh_t, tile, row_tile, ROW_TILES)
    store_words(nibble, dh_t_metadata, tile, row_tile, ROW_TILES)
    low, high, nibble = two_of_four(dense_y.permute([1, 0]), False)
    store_pairs(low, high, y_t, tile, row_tile, ROW_TILES)
    store_words(nibble, y_t_metadata, tile, row_tile, ROW_TILES)


@triton.jit
def _scatter_rows(dense, neuron, row_tile, values, metadata, NEURONS: tl.constexpr, ROW_TILES: tl.constexpr):
    """Selects along tokens in [64 tokens, 64 neurons] and stores the rows of neurons, where they are any."""
    low, high, nibble = two_of_four(dense.permute([1, 0]), False)
    exists = neuron < NEURONS
    column = row_tile * _KEPT + tl.arange(0, _KEPT)[None, :]
    pairs = interleave(low, high).to(values.dtype.element_ty)
    tl.store(values + neuron.to(tl.int64) * (ROW_TILES * _KEPT) + column, pairs, mask=exists)
    # Words have halves of two rows, of which another thread block may store the other: the halves are stored apart.
    halves = metadata.to(tl.pointer_type(tl.int16))
    word = neuron % _TILE // 16 * 32 + neuron % 8 * 4 + tl.arange(0, 4)[None, :]
    offset = (neuron // _TILE * ROW_TILES + row_tile) * (2 * _WORDS) + 2 * word + neuron % 16 // 8
    tl.store(halves + offset, pack_halves(nibble).to(tl.int16), mask=exists)


@triton.jit
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    ROW_TILES: tl.constexpr,
    NEURONS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    tile, row_tile = tl.program_id(0), tl.program_id(1)
    dense_dh, dense_y = _differentiate_tile(dy, values, metadata, dh, row_tile, tile, ROWS, COLUMNS, TILES)
    listed = columns + (row_tile // BLOCK_TILES * TILES + tile) * _TILE
    neuron = tl.load(listed + tl.arange(0, _TILE))[:, None]
    if row_tile < ROW_TILES:  # a ragged last block is padded by more than a tile
        _scatter_rows(dense_dh, neuron, row_tile, dh_t, dh_t_metadata, NEURONS, ROW_TILES)
        _scatter_rows(dense_y, neuron, row_tile, y_t, y_t_metadata, NEURONS, ROW_TILES)


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
    row_tiles, neuron_tiles = -(-tokens // TILE), -(-neurons // TILE)
    transpose = (
        jax.ShapeDtypeStruct((neuron_tiles * TILE, row_tiles * TILE // 2), dy.dtype),
        jax.ShapeDtypeStruct((neuron_tiles, row_tiles, 2 * TILE), jnp.int32),
    )
    options = dict(
        out_shape=(jax.ShapeDtypeStruct(y.values.shape, dy.dtype), *transpose, *transpose),
        grid=(tiles, stored_row_tiles),
        num_warps=4,
        compute_capability=device.compute_capability(),
        ROWS=dy.shape[0],
        COLUMNS=dy.shape[1],
        TILES=tiles,
        ROW_TILES=row_tiles,
    )
    if venom:
        empty = jnp.zeros(transpose[0].shape, dy.dtype), jnp.full(transpose[1].shape, _EMPTY_WORD, jnp.int32)
        dh, *transposes = jax_triton.triton_call(
            dy,
            y.values,
            y.metadata,
            y.columns,
            *empty,
            *empty,
            kernel=_gradients_venom_kernel,
            input_output_aliases={4: 1, 5: 2, 6: 3, 7: 4},
            NEURONS=neurons,
            BLOCK_TILES=y.v // TILE,
            **options,
        )
    else:
        dh, *transposes = jax_triton.triton_call(dy, y.values, y.metadata, kernel=_gradients_24_kernel, **options)
    dh_t, y_t = (Sparse24(*transposes[i : i + 2], (neurons, tokens)) for i in (0, 2))
    return HiddenGradients(dataclasses.replace(y, values=dh), dh_t, y_t)
