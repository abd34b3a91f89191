"""Computes the 2:4 form of Y = relu(H)^2 in one pass over memory.

Numerics: Y is squared in float32, rounded once, and then selected from: bit for bit the reference.
What selection saw is summed in float32 (hidden_stats.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from sparse_lm.ops.checks import check_hidden_dtype
from sparse_lm.ops.compress import pad_to_tiles
from sparse_lm.ops.formats import TILE, HiddenStats, Sparse24
from sparse_lm.ops.hopper.frame import packed_24
from sparse_lm.ops.hopper.frame.emit import COMPILER_PARAMS, SCALAR, WARPGROUP_SIZE, i32
from sparse_lm.ops.hopper.frame.hidden_stats import STATS, WARPS, Seen, store_stats
from sparse_lm.ops.hopper.frame.thread_tile import Thread, Tile


def squared_relu_24(h: Array) -> tuple[Sparse24, HiddenStats]:
    """See `sparse_lm.ops.squared_relu_24`.

    Raises:
      NotImplementedError: h is not of 16-bit floats.
    """
    check_hidden_dtype(h.dtype)
    padded = pad_to_tiles(h)
    rows, columns = padded.shape

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 4, SCALAR, SCALAR))
    def sparsify_tile(_, h_gmem, values_gmem, metadata_gmem, stats_gmem, row, column):
        tile = Tile(Thread.current(), row.registers.item(), column.registers.item())
        sparsify(tile.load_words(h_gmem), tile, values_gmem, metadata_gmem, stats_gmem)

    def kernel(h_gmem, values_gmem, metadata_gmem, stats_gmem):
        tile = lax.axis_index("row"), lax.axis_index("column")
        sparsify_tile(h_gmem, values_gmem, metadata_gmem, stats_gmem, *tile)

    values, metadata, stats = plgpu.kernel(
        kernel,
        out_type=out_types(rows, columns, h.dtype),
        grid=(columns // TILE, rows // TILE),
        grid_names=("column", "row"),
        compiler_params=COMPILER_PARAMS,
        kernel_name="squared_relu_24",
    )(padded)
    return Sparse24(values, metadata, h.shape), HiddenStats(*jnp.sum(stats, axis=(0, 1)))


def out_types(rows: int, columns: int, dtype: jnp.dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types that `sparsify` fills, for an H of whole tiles: values, metadata, each warp's statistics of a
    tile."""
    row_tiles, column_tiles = rows // TILE, columns // TILE
    return (
        jax.ShapeDtypeStruct((rows, columns // 2), dtype),
        jax.ShapeDtypeStruct((row_tiles, column_tiles, WARPGROUP_SIZE), jnp.int32),
        jax.ShapeDtypeStruct((row_tiles * column_tiles, WARPS, STATS), jnp.float32),
    )


def sparsify(
    h: Sequence[Sequence[ir.Value]], tile: Tile, values: ir.Value, metadata: ir.Value, stats: ir.Value
) -> None:
    """Squares and selects from the words of a thread's two rows, and stores what is kept and what was seen."""
    ref = ir.MemRefType(values.type)
    seen = Seen.nothing()
    pairs = []
    for words in h:
        y = [packed_24.squared_relu(word, ref.element_type) for word in words]
        pairs.append([packed_24.two_of_four(four, signed=False) for four in packed_24.groups(y)])
        seen = seen.add(y, [pair.values for pair in pairs[-1]], ref.element_type)
    tile.store_packed(values, [[pair.values for pair in row] for row in pairs])
    tile.store_word(metadata, pairs)
    column_tiles = ir.MemRefType(metadata.type).shape[1]
    store_stats(stats, arith.addi(arith.muli(tile.row, i32(column_tiles)), tile.column), seen.stats())
