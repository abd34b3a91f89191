"""Compresses dense values at given positions: the last step of every selection."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int32

from sparse_lm.ops.checks import (
    check_array,
    check_axis,
    check_block,
    check_float,
    check_format,
    check_group,
    check_ids,
    check_matrix,
    described,
)
from sparse_lm.ops.formats import EMPTY_WORD, TILE, Sparse24, SparseVenom, pack_metadata
from sparse_lm.ops.select import Members, split_groups, take_two, top_two


def compress_24(
    x: Float[Array, "rows columns"],
    mask: Bool[Array, "rows columns"],
    axis: int = -1,
    *,
    dtype: DTypeLike | None = None,
) -> Sparse24:
    """Compresses `where(mask, x, 0)` [M, K] to Sparse24 [M, K], or for axis 0 its transpose to [K, M].

    Of more than two True in a group of four along `axis`, -1 or 0, the two lowest are kept. A group with fewer is
    filled up with zeros at its lowest free positions. Values have `dtype`, by default that of x.
    """
    check_matrix("x", x)
    check_axis(axis)
    check_float("dtype", dtype)
    check_array("mask", mask)
    if mask.shape != x.shape or mask.dtype != bool:
        raise ValueError(f"mask must be bool{list(x.shape)}; got {described(mask)}")
    kept = split_groups(pad_to_tiles(jnp.where(mask, x, 0).astype(jnp.float32)), axis)
    positions = top_two(split_groups(pad_to_tiles(mask), axis))
    return pack_24(kept, *positions, axis=axis, shape=x.shape, dtype=dtype or x.dtype)


def pack_24(
    members: Members, first: Array, second: Array, *, axis: int = -1, shape: tuple[int, ...], dtype: DTypeLike
) -> Sparse24:
    """Compresses a matrix of this logical shape, which `split_groups` has split along `axis`, in whole tiles.

    Members are float32; `first` and `second`, uint32, are the positions of each group's survivors. For axis 0 the
    result is the transpose, which happens here, where half of the matrix is left.
    """
    low, high = (survivor.astype(dtype) for survivor in take_two(members, first, second))
    if axis == 0:
        values = jnp.stack([low, high], axis=1).reshape(-1, low.shape[1]).T
        return Sparse24(values, pack_metadata(first.T, second.T), shape[::-1])
    values = jnp.stack([low, high], axis=-1).reshape(low.shape[0], -1)
    return Sparse24(values, pack_metadata(first, second), shape)


def condense(x: Float[Array, "T F"], columns: Int32[Array, "blocks S"], v: int) -> Float[Array, "T S"]:
    """Gathers the columns that each block of v rows keeps, [M, K] -> [M, Kc].

    `columns` int32 [ceil(M / v), Kc] lists them by block; K stands for a column of zeros.
    """
    check_matrix("x", x)
    rows, width = x.shape
    check_ids("columns", columns)
    _check_lists(columns, rows, columns.shape[1], v)
    blocks = jnp.pad(x, ((0, -rows % v), (0, 0))).reshape(-1, v, width)
    condensed = jnp.take_along_axis(blocks, columns[:, None, :], axis=2, mode="fill", fill_value=0)
    return condensed.reshape(-1, columns.shape[1])[:rows]


def to_venom(
    condensed: Float[Sparse24, "T S"],
    columns: Int32[Array, "blocks S"],
    width: int,
    v: int,
    m: int,
    contiguous: int = 1,
) -> Float[SparseVenom, "T F"]:
    """Brings a matrix [M, K] whose condensed columns [M, Kc] are 2:4 already to V:2:M form.

    `columns` int32 [ceil(M / v), Kc] says which column each condensed column of a block is, and `width` is K. v divides
    64 or is a multiple of it; m and `contiguous` are those of `SparseVenom`.
    """
    check_format("condensed", condensed, Sparse24)
    check_block(v)
    check_group(m, width)
    check_ids("columns", columns)
    if contiguous < 1 or columns.shape[1] % contiguous:
        raise ValueError(f"contiguous = {contiguous} must divide the {columns.shape[1]} columns of a list")
    _check_lists(columns, condensed.shape[0], condensed.shape[1], v)
    if condensed.shape[1] != 4 * width // m:
        raise ValueError(f"condensed {list(condensed.shape)} must have 4 of each m = {m} of the {width} columns")
    rows = condensed.values.shape[0]
    missing_rows = -rows % max(v, TILE)
    blocks = (rows + missing_rows) // v
    extra = blocks - columns.shape[0], 2 * condensed.values.shape[1] - columns.shape[1]
    return SparseVenom(
        jnp.pad(condensed.values, ((0, missing_rows), (0, 0))),
        jnp.pad(condensed.metadata, ((0, missing_rows // TILE), (0, 0), (0, 0)), constant_values=EMPTY_WORD),
        jnp.pad(columns, ((0, extra[0]), (0, extra[1])), constant_values=width),
        (condensed.shape[0], width),
        v,
        m,
        contiguous,
    )


def pad_to_tiles(x: Array) -> Array:
    """Pads [M, K] with zeros to [Mp, Kp], whole 64 x 64 tiles."""
    return jnp.pad(x, [(0, -size % TILE) for size in x.shape])


def _check_lists(columns: Array, rows: int, kept: int, v: int) -> None:
    if v < 1:
        raise ValueError(f"v = {v} must be positive")
    expected = -(-rows // v), kept
    if columns.shape != expected:
        raise ValueError(
            f"columns {list(columns.shape)} must be {list(expected)}, a list for each {v} of the {rows} rows"
        )
