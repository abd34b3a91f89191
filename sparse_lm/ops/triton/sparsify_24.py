"""Dense matrix, or Y = relu(H)^2 of one, to its 2:4 form in one pass over memory; a thread block takes a 64 x 64 tile.

Numerics: those of the reference bit for bit; `sparse_lm.ops.select` has the rules. What selection saw of Y is
summed in float32, by tile, then by XLA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from sparse_lm.ops.formats import TILE, HiddenStats, Sparse24
from sparse_lm.ops.triton import device
from sparse_lm.ops.triton.two_of_four import interleave, pack_words, spread, two_of_four

_TILE = tl.constexpr(TILE)
_KEPT = tl.constexpr(TILE // 2)
_WORDS = tl.constexpr(2 * TILE)
_STATS = len(HiddenStats._fields)


@triton.jit
def load_tile(x, row_tile, column_tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 [64, 64]; zeros past the last row and column."""
    row = row_tile * _TILE + tl.arange(0, _TILE)[:, None]
    column = column_tile * _TILE + tl.arange(0, _TILE)[None, :]
    inside = (row < ROWS) & (column < COLUMNS)
    return tl.load(x + row.to(tl.int64) * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_pairs(low, high, values, row_tile, k_tile, K_TILES: tl.constexpr):
    """Survivors [64, 16] of a tile, rounded."""
    row = row_tile * _TILE + tl.arange(0, _TILE)[:, None]
    column = k_tile * _KEPT + tl.arange(0, _KEPT)[None, :]
    pairs = interleave(low, high).to(values.dtype.element_ty)
    tl.store(values + row.to(tl.int64) * (K_TILES * _KEPT) + column, pairs)


@triton.jit
def store_words(nibble, metadata, row_tile, k_tile, K_TILES: tl.constexpr):
    """Metadata of a tile, of nibbles [64, 16]."""
    tl.store(metadata + (row_tile * K_TILES + k_tile) * _WORDS + tl.arange(0, _WORDS), pack_words(nibble))


@triton.jit
def squared_relu(h, dtype: tl.constexpr):
    """relu(h)^2 of float32, rounded once to `dtype`, as float32."""
    positive = tl.maximum(h, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return (positive * positive).to(dtype).to(tl.float32)


@triton.jit
def store_stats(y, low, high, stats):
    """`HiddenStats` of a tile, in one row of `stats`."""
    tl.store(stats, tl.sum(tl.sum((y != 0).to(tl.float32), axis=1), axis=0))
    tl.store(stats + 1, tl.sum(tl.sum(y * y, axis=1), axis=0))
    tl.store(stats + 2, tl.sum(tl.sum(low * low + high * high, axis=1), axis=0))


@triton.jit
def _sparsify_24_kernel(
    x,
    scale,
    values,
    metadata,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOFT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    k_tile, row_tile = tl.program_id(0), tl.program_id(1)
    if TRANSPOSED:
        tile = load_tile(x, k_tile, row_tile, ROWS, COLUMNS).permute([1, 0])
    else:
        tile = load_tile(x, row_tile, k_tile, ROWS, COLUMNS)
    low, high, nibble = two_of_four(tile, SOFT)
    factor = tl.load(scale)
    k_tiles: tl.constexpr = ((ROWS if TRANSPOSED else COLUMNS) + _TILE - 1) // _TILE
    store_pairs(low * factor, high * factor, values, row_tile, k_tile, k_tiles)
    store_words(nibble, metadata, row_tile, k_tile, k_tiles)


@triton.jit
def _soft_threshold_24_kernel(
    w, scale, values, metadata, dense, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCALED_TILES: tl.constexpr
):
    k_tile, row_tile = tl.program_id(0), tl.program_id(1)
    low, high, nibble = two_of_four(load_tile(w, row_tile, k_tile, ROWS, COLUMNS), True)
    factor = tl.load(scale + row_tile // SCALED_TILES)
    low, high = low * factor, high * factor
    k_tiles: tl.constexpr = (COLUMNS + _TILE - 1) // _TILE
    store_pairs(low, high, values, row_tile, k_tile, k_tiles)
    store_words(nibble, metadata, row_tile, k_tile, k_tiles)
    row = row_tile * _TILE + tl.arange(0, _TILE)[:, None]
    column = k_tile * _TILE + tl.arange(0, _TILE)[None, :]
    masked = spread(low, high, nibble).to(dense.dtype.element_ty)
    tl.store(dense + row.to(tl.int64) * COLUMNS + column, masked, mask=(row < ROWS) & (column < COLUMNS))


@triton.jit
def _squared_relu_24_kernel(h, values, metadata, stats, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    k_tile, row_tile = tl.program_id(0), tl.program_id(1)
    y = squared_relu(load_tile(h, row_tile, k_tile, ROWS, COLUMNS), values.dtype.element_ty)
    low, high, nibble = two_of_four(y, False)
    k_tiles: tl.constexpr = (COLUMNS + _TILE - 1) // _TILE
    store_pairs(low, high, values, row_tile, k_tile, k_tiles)
    store_words(nibble, metadata, row_tile, k_tile, k_tiles)
    store_stats(y, low, high, stats + (row_tile * k_tiles + k_tile) * 3)


def sparsify_24(
    x: Array, method: str, axis: int, *, scale: ArrayLike, dtype: DTypeLike, key: Array | None = None
) -> Sparse24:
    """See `sparse_lm.ops.sparsify_24`.

    Raises:
      NotImplementedError: the method draws at random, or the dtypes.
    """
    del key
    if method == "mvue":
        raise NotImplementedError("does not draw at random")
    check_dtypes(x.dtype, jnp.dtype(dtype))
    shape = x.shape[::-1] if axis == 0 else x.shape
    values, metadata = jax_triton.triton_call(
        x,
        jnp.asarray(scale, jnp.float32).reshape(1),
        kernel=_sparsify_24_kernel,
        out_shape=_outputs(shape, dtype),
        ROWS=x.shape[0],
        COLUMNS=x.shape[1],
        SOFT=method == "soft_threshold",
        TRANSPOSED=axis == 0,
        **_launch(shape),
    )
    return Sparse24(values, metadata, shape)


def soft_threshold_24(w: Array, scale: Array, *, dtype: DTypeLike) -> tuple[Sparse24, Array]:
    """See `sparse_lm.ops.soft_threshold_24`.

    Raises:
      NotImplementedError: the dtypes, or rows of one scale that are no multiple of 64.
    """
    check_dtypes(w.dtype, jnp.dtype(dtype))
    scaled_rows = w.shape[0] // scale.shape[0]
    if scaled_rows % TILE and scale.shape[0] > 1:
        raise NotImplementedError(f"needs a scale for a multiple of {TILE} rows, not for {scaled_rows}")
    values, metadata, dense = jax_triton.triton_call(
        w,
        scale.astype(jnp.float32),
        kernel=_soft_threshold_24_kernel,
        out_shape=(*_outputs(w.shape, dtype), jax.ShapeDtypeStruct(w.shape, dtype)),
        ROWS=w.shape[0],
        COLUMNS=w.shape[1],
        SCALED_TILES=-(-scaled_rows // TILE),
        **_launch(w.shape),
    )
    return Sparse24(values, metadata, w.shape), dense


def squared_relu_24(h: Array) -> tuple[Sparse24, HiddenStats]:
    """See `sparse_lm.ops.squared_relu_24`.

    Raises:
      NotImplementedError: h is not of 16-bit floats.
    """
    check_dtypes(h.dtype, h.dtype)
    values, metadata = _outputs(h.shape, h.dtype)
    stats = jax.ShapeDtypeStruct((*metadata.shape[:2], _STATS), jnp.float32)
    values, metadata, stats = jax_triton.triton_call(
        h,
        kernel=_squared_relu_24_kernel,
        out_shape=(values, metadata, stats),
        ROWS=h.shape[0],
        COLUMNS=h.shape[1],
        **_launch(h.shape),
    )
    return Sparse24(values, metadata, h.shape), HiddenStats(*jnp.sum(stats, axis=(0, 1)))


def check_dtypes(x: jnp.dtype, out: jnp.dtype) -> None:
    if x not in (jnp.float32, jnp.bfloat16, jnp.float16) or out not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"takes float32 or 16-bit floats and gives 16-bit floats, not {x} to {out}")


def _tiles(shape: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // TILE), -(-shape[1] // TILE)


def _outputs(shape: tuple[int, int], dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Values and metadata of a 2:4 matrix."""
    rows, columns = _tiles(shape)
    values = jax.ShapeDtypeStruct((rows * TILE, columns * TILE // 2), dtype)
    return values, jax.ShapeDtypeStruct((rows, columns, 2 * TILE), jnp.int32)


def _launch(shape: tuple[int, int]) -> dict:
    rows, columns = _tiles(shape)
    return dict(grid=(columns, rows), num_warps=4, compute_capability=device.compute_capability())
