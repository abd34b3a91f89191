"""Sparsifies a dense matrix to 2:4 in one pass over memory.

Why: weights are sparsified every step and activations in every layer. XLA reads the matrix once for
the values and again for the metadata, and writes what lies between.

A block is one warpgroup and takes one tile of 64 x 64 (thread_tile.py). For the transpose (axis 0) a
tile takes the way through shared memory, whose odd row length keeps columns off one bank.

Numerics: those of the reference bit for bit; `sparse_lm.ops.select` has the rules.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxlib.mlir import ir

from sparse_lm.ops.checks import check_multiples, check_selection_dtypes
from sparse_lm.ops.compress import pad_to_tiles
from sparse_lm.ops.formats import TILE, Sparse24, types_24
from sparse_lm.ops.hopper.frame import emit, mvue, packed_24
from sparse_lm.ops.hopper.frame.emit import Number, shared_memory, widen
from sparse_lm.ops.hopper.frame.packed_24 import PackedPair
from sparse_lm.ops.hopper.frame.thread_tile import HALVES, SHARED_STRIDE, THREAD_COLUMNS, Tile, copy_tile, run_by_tile
from sparse_lm.ops.hopper.frame.two_of_four import groups_of_four, two_of_four
from sparse_lm.ops.mvue import threefry_key


def sparsify_24(x: Array, method: str, axis: int, *, dtype: DTypeLike, key: Array | None = None) -> Sparse24:
    """See `sparse_lm.ops.sparsify_24`; takes float32 or 16-bit floats to 16-bit floats, refuses other dtypes, and for
    "mvue" keys of another generator than JAX's default one."""
    check_selection_dtypes(x.dtype, dtype)
    key = threefry_key(key) if method == "mvue" else None
    values, metadata = _call(pad_to_tiles(x), dtype, transposed=axis == 0, key=key)
    return Sparse24(values, metadata, x.shape[::-1] if axis == 0 else x.shape)


def soft_threshold_24(w: Array, scale: Array, axis: int, *, dtype: DTypeLike) -> tuple[Sparse24, Array]:
    """See `sparse_lm.ops.soft_threshold_24`; refuses the dtypes that `sparsify_24` does, and of several scales rows of
    one that are no multiple of 64."""
    check_selection_dtypes(w.dtype, dtype)
    if scale.shape[0] > 1:
        check_multiples({"rows of a scale": (w.shape[0] // scale.shape[0], TILE)})
    shape = w.shape[::-1] if axis == 0 else w.shape
    values, metadata, dense = _call(pad_to_tiles(w), dtype, transposed=axis == 0, scale=scale.astype(jnp.float32))
    return Sparse24(values, metadata, shape), dense[: shape[0], : shape[1]]


def _call(
    x: Array, dtype: DTypeLike, *, transposed: bool, scale: Array | None = None, key: Array | None = None
) -> tuple[Array, ...]:
    """Computes values and metadata by magnitude, or by "mvue" with a key, int32 [2].

    With a scale by soft threshold, and the masked matrix as well; scale i is that of the i-th share of the rows.
    """
    rows, columns = x.shape[::-1] if transposed else x.shape
    row_tiles = rows // TILE
    out_type = types_24(rows, columns, dtype)
    if scale is not None:
        out_type = *out_type, jax.ShapeDtypeStruct((rows, columns), dtype)

    def sparsify_tile(tile, x_gmem, scale_gmem, key_gmem, values_gmem, metadata_gmem, *rest):
        (*dense_gmem, tile_smem), element = rest, emit.element_of(values_gmem)
        runs = _load_transposed(x_gmem, tile_smem, tile) if transposed else tile.load(x_gmem)
        grouped = [groups_of_four(widen(run)) for run in runs]
        if key is not None:
            above_one = _above_one(mvue.load_key(key_gmem), tile, x.shape, transposed)
            pairs = [map(mvue.sample_two, *row) for row in zip(grouped, above_one, strict=True)]
        else:
            pairs = [[two_of_four(four, shrink=scale is not None) for four in row] for row in grouped]
        if scale is not None:
            tiles_of_one = -(-row_tiles // scale.shape[0])
            factor = emit.global_memory(scale_gmem).load(tile.row // tiles_of_one)
            pairs = [[pair._replace(low=pair.low * factor, high=pair.high * factor) for pair in row] for row in pairs]
        packed = [[PackedPair(packed_24.pack(*pair[:2], element), pair.nibble) for pair in row] for row in pairs]
        tile.store_24(values_gmem, metadata_gmem, packed)
        for ref in dense_gmem:
            for half, row in zip(HALVES, pairs, strict=True):
                spread = [packed_24.pack(*pair.spread()[i : i + 2], element) for pair in row for i in (0, 2)]
                emit.store_words(ref, tile.start(half, columns), spread)

    return run_by_tile(
        sparsify_tile,
        [x, jnp.zeros(1) if scale is None else scale, jnp.zeros(2, jnp.int32) if key is None else key],
        out_type,
        (row_tiles, columns // TILE),
        scratch=[plgpu.SMEM((TILE, SHARED_STRIDE) if transposed else (1, 1), x.dtype)],
        name="sparsify_24",
    )


def _above_one(key: tuple[Number, Number], tile: Tile, shape: tuple[int, int], transposed: bool) -> list[list[Number]]:
    """Computes `mvue.uniform_above_one` for each group of a thread's two rows, of a matrix [M, K]."""
    column = tile.column * TILE + tile.thread.column
    rows = []
    for half in HALVES:
        row = tile.row * TILE + tile.thread.row + 8 * half
        number = (column >> 4) * shape[1] + row if transposed else row * (shape[1] // 16) + (column >> 4)
        rows.append(mvue.uniform_above_one(key, number))
    return rows


def _load_transposed(x: ir.Value, tile_smem: ir.Value, tile: Tile) -> list[list[Number]]:
    """Loads both rows' columns of the transpose of x: columns of x, by way of shared memory."""
    thread = tile.thread
    # A tile's rows are columns of the result: the tile at (column, row) of x.
    copy_tile(x, Tile(thread, tile.column, tile.row), tile_smem)
    runs, shared = [], shared_memory(tile_smem)
    for half in HALVES:
        x_column = thread.row + 8 * half
        indices = ((thread.column + i) * SHARED_STRIDE + x_column for i in range(THREAD_COLUMNS))
        runs.append([shared.load(index) for index in indices])
    return runs
