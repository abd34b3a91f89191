"""Computes dH = 2 sqrt(Y) dY where Y is stored, and the 2:4 forms of the transposes of dH and Y, in one pass.

A thread block takes 64 tokens of 64 columns, and of each four tokens keeps the two largest, or draws two. It sums Y dY
of its columns, and XLA adds these sums.

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

from sparse_lm.ops.checks import check_hidden_dtype
from sparse_lm.ops.formats import TILE, HiddenGradients, Sparse24, SparseVenom, types_24
from sparse_lm.ops.mvue import threefry_key
from sparse_lm.ops.triton.frame import mvue, packed_24, tiles
from sparse_lm.ops.triton.frame.gluon_call import align_rows
from sparse_lm.ops.triton.frame.two_of_four import members, spread, unpack_words
from sparse_lm.ops.triton.passes.sparsify_24 import call_by_tiles

_TILE = gl.constexpr(TILE)
_DH, _Y = gl.constexpr(0), gl.constexpr(1)  # halves of a word


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
def squared_relu_gradients_kernel(
    dy,
    values,
    metadata,
    key,
    dh,
    dh_t,
    dh_t_metadata,
    y_t,
    y_t_metadata,
    y_dy,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Differentiates a tile of Y. Without a key, it draws nothing."""
    dtype: gl.constexpr = dh.dtype.element_ty
    ROW_TILES: gl.constexpr = (ROWS + _TILE - 1) // _TILE
    TILES: gl.constexpr = (COLUMNS + _TILE - 1) // _TILE
    row_tile, tile = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    low, high = tiles.load_pairs(dy, row_tile, tile, ROWS, COLUMNS)
    words = gl.load(metadata + (row_tile * TILES + tile) * tiles.WORDS + gl.arange(0, tiles.WORDS, tiles.WORDS_LAYOUT))
    nibble = gl.convert_layout(unpack_words(words), tiles.GROUPS_LAYOUT, assert_trivial=True)
    y = gl.load(tiles.locate_survivors(values, row_tile, tile, TILES))
    first_y, second_y = packed_24.unpack(y, dtype)
    first, second = packed_24.unpack(packed_24.take_two(low, high, nibble), dtype)
    row = row_tile * _TILE + gl.arange(0, _TILE, gl.SliceLayout(1, tiles.GROUPS_LAYOUT))
    gl.store(y_dy + tile * ROW_TILES * _TILE + row, gl.sum(first * first_y + second * second_y, axis=1))
    kept = packed_24.pack(first * (2.0 * gl.sqrt_rn(first_y)), second * (2.0 * gl.sqrt_rn(second_y)), dtype)
    gl.store(tiles.locate_survivors(dh, row_tile, tile, TILES), kept)
    # The transposes of dH and of Y, dense, in the halves of [64, 64] words, by way of shared memory.
    both = gl.convert_layout(spread(*packed_24.zip_halves(kept, y), nibble).permute([1, 0]), tiles.TILE_LAYOUT)

    above_one = None
    if key is not None:
        row = tile * _TILE + gl.arange(0, _TILE, gl.SliceLayout(1, tiles.FOUR_GROUPS_LAYOUT))
        above_one = mvue.uniform_above_one(key, row[:, None], row_tile, 1, TILES * _TILE)
    dh_kept, dh_nibble = _keep_along_tokens(both, above_one, _DH, dtype)
    y_kept, y_nibble = _keep_along_tokens(both, above_one, _Y, dtype)
    tiles.store_sparse(dh_kept, dh_nibble, dh_t, dh_t_metadata, tile, row_tile, ROW_TILES)
    tiles.store_sparse(y_kept, y_nibble, y_t, y_t_metadata, tile, row_tile, ROW_TILES)


def squared_relu_gradients(
    dy: Array, y: Sparse24 | SparseVenom, *, key: Array | None = None, factor: Array | None = None
) -> HiddenGradients:
    """See `sparse_lm.ops.squared_relu_gradients`.

    It refuses a Venom y, dy and y that are not of 16-bit floats of one dtype, and a key of another generator than JAX's
    default one.
    """
    if isinstance(y, SparseVenom):
        raise NotImplementedError("takes a 2:4 y, no Venom one")
    check_hidden_dtype(dy.dtype, y.dtype)
    dy = dy if factor is None else dy * factor
    transpose = types_24(*y.shape[::-1], dy.dtype)
    sums = jax.ShapeDtypeStruct((transpose[1].shape[0], y.values.shape[0]), jnp.float32)
    dh, *transposes, y_dy = call_by_tiles(
        squared_relu_gradients_kernel,
        *(align_rows(dy), y.values, y.metadata, None if key is None else threefry_key(key)),
        out=(jax.ShapeDtypeStruct(y.values.shape, dy.dtype), *transpose, *transpose, sums),
    )
    dh_t, y_t = (Sparse24(*transposes[i : i + 2], y.shape[::-1]) for i in (0, 2))
    return HiddenGradients(dataclasses.replace(y, values=dh), dh_t, y_t, jnp.sum(y_dy, axis=0)[: dy.shape[0]])
