"""Sparsifies a dense matrix, or Y = relu(H)^2 of one, to 2:4 in one pass over memory.

A thread block takes a 64 x 64 tile.

Numerics: those of the reference bit for bit; `sparse_lm.ops.select` has the rules. What selection saw of Y is
summed in float32, by tile, then by XLA.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_lm.ops.checks import check_hidden_dtype, check_multiples, check_selection_dtypes
from sparse_lm.ops.formats import TILE, HiddenStats, Sparse24, types_24
from sparse_lm.ops.mvue import threefry_key
from sparse_lm.ops.triton.frame import mvue, packed_24, tiles
from sparse_lm.ops.triton.frame.gluon_call import align_rows, gluon_call
from sparse_lm.ops.triton.frame.two_of_four import members, spread, two_of_four

_TILE = gl.constexpr(TILE)
STATS = gl.constexpr(len(HiddenStats._fields))


@gluon.jit
def sparsify_24_kernel(
    x,
    scale,
    key,
    values,
    metadata,
    dense,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    METHOD: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    SCALED_TILES: gl.constexpr,
):
    """Sparsifies a tile of x [ROWS, COLUMNS].

    The key is for "mvue". For "soft_threshold" as many tiles of rows as SCALED_TILES share a scale, None being all, and
    the masked matrix goes to `dense`.
    """
    K_TILES: gl.constexpr = ((ROWS if TRANSPOSED else COLUMNS) + _TILE - 1) // _TILE
    row_tile, k_tile = gl.program_id(0) // K_TILES, gl.program_id(0) % K_TILES
    if TRANSPOSED:
        tile = tiles.load_tile(x, k_tile, row_tile, ROWS, COLUMNS, tiles.rows_layout(8, 8, gl.num_warps()))
        tile = gl.convert_layout(tile.permute([1, 0]), tiles.TILE_LAYOUT)
    else:
        tile = tiles.load_tile(x, row_tile, k_tile, ROWS, COLUMNS, tiles.TILE_LAYOUT)
    if METHOD == "mvue":
        row = row_tile * _TILE + tiles.indices(_TILE, tiles.FOUR_GROUPS_LAYOUT, 0)
        if TRANSPOSED:
            PADDED_COLUMNS: gl.constexpr = (COLUMNS + _TILE - 1) // _TILE * _TILE
            above_one = mvue.uniform_above_one(key, row, k_tile, 1, PADDED_COLUMNS)
        else:
            above_one = mvue.uniform_above_one(key, row, k_tile, K_TILES * tiles.GROUPS // 4, 1)
        low, high, nibble = mvue.sample_two(*members(tile), above_one)
    else:
        low, high, nibble = two_of_four(tile, METHOD == "soft_threshold")
    if METHOD == "soft_threshold":
        factor = gl.load(scale if SCALED_TILES is None else scale + row_tile // SCALED_TILES)
        low, high = low * factor, high * factor
    kept = packed_24.pack(low, high, values.dtype.element_ty)
    tiles.store_sparse(kept, nibble, values, metadata, row_tile, k_tile, K_TILES)
    if METHOD == "soft_threshold":
        HEIGHT: gl.constexpr = COLUMNS if TRANSPOSED else ROWS
        WIDTH: gl.constexpr = ROWS if TRANSPOSED else COLUMNS
        row, column, offset = tiles.offsets(row_tile, k_tile, WIDTH, _TILE, tiles.TILE_LAYOUT)
        masked = gl.convert_layout(spread(low, high, nibble), tiles.TILE_LAYOUT, assert_trivial=True)
        gl.store(dense + offset, masked.to(dense.dtype.element_ty), mask=(row < HEIGHT) & (column < WIDTH))


@gluon.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@gluon.jit
def squared_relu_24_kernel(h, values, metadata, stats, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Sparsifies a tile of relu(h)^2, and stores its `HiddenStats`. COLUMNS is even."""
    K_TILES: gl.constexpr = (COLUMNS + _TILE - 1) // _TILE
    dtype: gl.constexpr = values.dtype.element_ty
    row_tile, k_tile = gl.program_id(0) // K_TILES, gl.program_id(0) % K_TILES
    low, high = tiles.load_pairs(h, row_tile, k_tile, ROWS, COLUMNS)
    low, high = packed_24.squared_relu(low, dtype), packed_24.squared_relu(high, dtype)
    kept, nibble = packed_24.two_of_four(low, low, high, high, SIGNED=False)
    tiles.store_sparse(kept, nibble, values, metadata, row_tile, k_tile, K_TILES)

    stats += gl.program_id(0) * STATS
    a, b = packed_24.unpack(low, dtype)
    c, d = packed_24.unpack(high, dtype)
    e, f = packed_24.unpack(kept, dtype)
    nonzeros = packed_24.mark_nonzeros(low) + packed_24.mark_nonzeros(high)
    sums = nonzeros, a * a + b * b + c * c + d * d, e * e + f * f
    nonzeros, energy, kept_energy = gl.reduce(sums, None, _add_three)
    gl.store(stats, ((nonzeros & 0xFFFF) + (nonzeros >> 16)).to(gl.float32))
    gl.store(stats + 1, energy)
    gl.store(stats + 2, kept_energy)


def sparsify_24(x: Array, method: str, axis: int, *, dtype: DTypeLike, key: Array | None = None) -> Sparse24:
    """See `sparse_lm.ops.sparsify_24`; refuses what `hopper` does."""
    check_selection_dtypes(x.dtype, dtype)
    shape = x.shape[::-1] if axis == 0 else x.shape
    key = threefry_key(key) if method == "mvue" else None
    constants = dict(dense=None, METHOD=method, TRANSPOSED=axis == 0, SCALED_TILES=None)
    out = types_24(*shape, dtype)
    return Sparse24(*call_by_tiles(sparsify_24_kernel, x, None, key, out=out, **constants), shape)


def soft_threshold_24(w: Array, scale: Array, axis: int, *, dtype: DTypeLike) -> tuple[Sparse24, Array]:
    """See `sparse_lm.ops.soft_threshold_24`; refuses what `hopper` does."""
    check_selection_dtypes(w.dtype, dtype)
    scaled_rows = w.shape[0] // scale.shape[0]
    if scale.shape[0] > 1:
        check_multiples({"rows of a scale": (scaled_rows, TILE)})
    shape = w.shape[::-1] if axis == 0 else w.shape
    out = *types_24(*shape, dtype), jax.ShapeDtypeStruct(shape, dtype)
    scaled_tiles = None if axis == 0 else -(-scaled_rows // TILE)
    constants = dict(METHOD="soft_threshold", TRANSPOSED=axis == 0, SCALED_TILES=scaled_tiles)
    *sparse, dense = call_by_tiles(sparsify_24_kernel, w, scale.astype(jnp.float32), None, out=out, **constants)
    return Sparse24(*sparse, shape), dense


def squared_relu_24(h: Array, *, factor: Array | None = None) -> tuple[Sparse24, HiddenStats]:
    """See `sparse_lm.ops.squared_relu_24`; refuses an h that is not of 16-bit floats."""
    check_hidden_dtype(h.dtype)
    h = h if factor is None else h * factor
    values, metadata = types_24(*h.shape, h.dtype)
    out = values, metadata, jax.ShapeDtypeStruct((*metadata.shape[:2], STATS.value), jnp.float32)
    *sparse, stats = call_by_tiles(squared_relu_24_kernel, align_rows(h), out=out)
    return Sparse24(*sparse, h.shape), HiddenStats(*jnp.sum(stats, axis=(0, 1)))


def call_by_tiles(
    kernel, x: Array, *operands: Array, out: tuple[jax.ShapeDtypeStruct, ...], **constants
) -> list[Array]:
    """Runs a kernel on x [ROWS, COLUMNS], with a thread block for each tile of 64 x 64."""
    blocks = math.prod(-(-size // TILE) for size in x.shape)
    constants |= dict(ROWS=x.shape[0], COLUMNS=x.shape[1])
    return gluon_call(kernel, x, *operands, out=out, blocks=blocks, warps=tiles.WARPS, **constants)
