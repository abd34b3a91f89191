"""Dense matrix, or Y = relu(H)^2 of one, to V:2:M form.

A thread block takes v rows and 16 groups of m columns: 64 condensed columns, what a tile of metadata describes.
It reads them 64 rows at a time and sums up the squares of every column; chooses the four columns of largest norm
of each group; and reads those again, from the cache, to select in each row.

Numerics: norms in float32, in an order of their own, so two columns of nearly equal norm may rank otherwise than
in the reference. All else is the reference bit for bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl
from jax import Array
from jax.typing import DTypeLike

from sparse_lm.ops.formats import TILE, HiddenStats, SparseVenom
from sparse_lm.ops.triton import device
from sparse_lm.ops.triton.sparsify_24 import check_dtypes
from sparse_lm.ops.triton.two_of_four import interleave, magnitude_rank, pack_words, squared_relu, two_of_four

_TILE = tl.constexpr(TILE)
_KEPT = tl.constexpr(TILE // 2)
_WORDS = tl.constexpr(2 * TILE)
_GROUPS = tl.constexpr(TILE // 4)  # of a tile
_WIDEST_GROUP = 64
_STATS = len(HiddenStats._fields)


@triton.jit
def _load(x, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATE: tl.constexpr):
    """float32 of rows and columns, the squared relu taken if ACTIVATE; zeros past the last of them."""
    inside = (row < ROWS) & (column < COLUMNS)
    tile = tl.load(x + row.to(tl.int64) * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATE:
        tile = squared_relu(tile, x.dtype.element_ty)
    return tile


@triton.jit
def _choose_columns(energy, first, M: tl.constexpr, COLUMNS: tl.constexpr):
    """The four largest of each group of energies [16, M], ascending: [64] columns; COLUMNS past the last group."""
    rank = magnitude_rank(energy)
    place = tl.arange(0, M)
    mine, other = rank[:, :, None], rank[:, None, :]
    earlier = (place[None, :] < place[:, None])[None, :, :]
    beaten_by = tl.sum(((other > mine) | ((other == mine) & earlier)).to(tl.int32), axis=2)
    keep = (beaten_by < 4).to(tl.int32)
    slot = tl.cumsum(keep, axis=1) - 1
    chosen = (keep[:, :, None] != 0) & (slot[:, :, None] == tl.arange(0, 4)[None, None, :])
    member = tl.sum(tl.where(chosen, place[None, :, None], 0), axis=1)
    start = first + M * tl.arange(0, _GROUPS)[:, None]
    return tl.where(start < COLUMNS, start + member, COLUMNS).reshape([_TILE])


@triton.jit
def _sparsify_venom_kernel(
    x,
    values,
    metadata,
    columns,
    stats,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    K_TILES: tl.constexpr,
    ACTIVATE: tl.constexpr,
):
    k_tile, block = tl.program_id(0), tl.program_id(1)
    first = k_tile * _GROUPS * M
    column = first + tl.arange(0, _GROUPS * M)[None, :]
    lane = tl.arange(0, _TILE)[:, None]
    squares = tl.zeros([_TILE, _GROUPS * M], tl.float32)
    nonzeros = tl.zeros([_TILE], tl.float32)
    for start in range(0, V, _TILE):
        tile = _load(x, block * V + start + lane, column, ROWS, COLUMNS, ACTIVATE)
        squares += tile * tile
        if ACTIVATE:
            nonzeros += tl.sum((tile != 0).to(tl.float32), axis=1)
    energy = tl.sum(squares, axis=0)
    kept = _choose_columns(energy.reshape([_GROUPS, M]), first, M, COLUMNS)
    tl.store(columns + (block * K_TILES + k_tile) * _TILE + tl.arange(0, _TILE), kept)

    kept_squares = tl.zeros([_TILE, _GROUPS], tl.float32)
    for start in range(0, V, _TILE):
        row = block * V + start + lane
        low, high, nibble = two_of_four(_load(x, row, kept[None, :], ROWS, COLUMNS, ACTIVATE), False)
        pairs = interleave(low, high).to(values.dtype.element_ty)
        tl.store(values + row.to(tl.int64) * (K_TILES * _KEPT) + k_tile * _KEPT + tl.arange(0, _KEPT)[None, :], pairs)
        words = metadata + ((block * V + start) // _TILE * K_TILES + k_tile) * _WORDS
        tl.store(words + tl.arange(0, _WORDS), pack_words(nibble))
        if ACTIVATE:
            kept_squares += low * low + high * high
    if ACTIVATE:
        stats += (block * K_TILES + k_tile) * 3
        tl.store(stats, tl.sum(nonzeros, axis=0))
        tl.store(stats + 1, tl.sum(energy, axis=0))
        tl.store(stats + 2, tl.sum(kept_squares.reshape([_TILE * _GROUPS]), axis=0))


def sparsify_venom(x: Array, v: int, m: int, *, columns: str, dtype: DTypeLike) -> SparseVenom:
    """See `sparse_lm.ops.sparsify_venom`.

    Raises:
      NotImplementedError: dtypes, v, m, or the choice of columns.
    """
    return _call(x, v, m, columns, jnp.dtype(dtype), activate=False)[0]


def squared_relu_venom(h: Array, v: int, m: int, *, columns: str) -> tuple[SparseVenom, HiddenStats]:
    """See `sparse_lm.ops.squared_relu_venom`.

    Raises:
      NotImplementedError: dtype, v, m, or the choice of columns.
    """
    return _call(h, v, m, columns, h.dtype, activate=True)


def _call(
    x: Array, v: int, m: int, choice: str, dtype: jnp.dtype, *, activate: bool
) -> tuple[SparseVenom, HiddenStats]:
    check_dtypes(x.dtype, dtype)
    rows, width = x.shape
    if choice != "norm":
        raise NotImplementedError(f"chooses columns by norm, not {choice!r}")
    if width % m:
        raise ValueError(f"m = {m} must divide the {width} columns")
    if v % TILE or m & (m - 1) or not 4 <= m <= _WIDEST_GROUP:
        raise NotImplementedError(f"needs v to be a multiple of {TILE}, m a power of two up to 64, not {v}, {m}")
    blocks, k_tiles = -(-rows // v), -(-4 * width // (m * TILE))
    values, metadata, kept, stats = jax_triton.triton_call(
        x,
        kernel=_sparsify_venom_kernel,
        out_shape=(
            jax.ShapeDtypeStruct((blocks * v, k_tiles * TILE // 2), dtype),
            jax.ShapeDtypeStruct((blocks * v // TILE, k_tiles, 2 * TILE), jnp.int32),
            jax.ShapeDtypeStruct((blocks, k_tiles * TILE), jnp.int32),
            jax.ShapeDtypeStruct((blocks, k_tiles, _STATS), jnp.float32),
        ),
        grid=(k_tiles, blocks),
        num_warps=max(4, min(16, m // 2)),
        compute_capability=device.compute_capability(),
        ROWS=rows,
        COLUMNS=width,
        V=v,
        M=m,
        K_TILES=k_tiles,
        ACTIVATE=activate,
    )
    return SparseVenom(values, metadata, kept, x.shape, v, m), HiddenStats(*jnp.sum(stats, axis=(0, 1)))
