"""Y = relu(H)^2 to its 2:4 form in one pass over memory.

Numerics: Y is squared in float32, rounded once, and then selected from: bit for bit the reference.
What selection saw is summed in float32, by warp, then by XLA: in the same order in every run.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from sparse_lm.ops.compress import pad_to_tiles
from sparse_lm.ops.formats import TILE, HiddenStats, Sparse24
from sparse_lm.ops.hopper.emit import (
    COMPILER_PARAMS,
    SCALAR,
    f32,
    i32,
    i64,
    mul64,
    narrow,
    sum_of,
    warp_sum,
    widen,
)
from sparse_lm.ops.hopper.gather import global_pointer
from sparse_lm.ops.hopper.thread_tile import THREADS, Thread, Tile, groups
from sparse_lm.ops.hopper.two_of_four import two_of_four

WARPS = THREADS // 32
STATS = len(HiddenStats._fields)


def squared_relu_24(h: Array) -> tuple[Sparse24, HiddenStats]:
    """See `sparse_lm.ops.squared_relu_24`.

    Raises:
      NotImplementedError: h is not of 16-bit floats.
    """
    check_dtype(h.dtype)
    padded = pad_to_tiles(h)
    rows, columns = padded.shape
    row_tiles, column_tiles = rows // TILE, columns // TILE
    out_type = (
        jax.ShapeDtypeStruct((rows, columns // 2), h.dtype),
        jax.ShapeDtypeStruct((row_tiles, column_tiles, THREADS), jnp.int32),
        jax.ShapeDtypeStruct((row_tiles * column_tiles, WARPS, STATS), jnp.float32),
    )

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 4, SCALAR, SCALAR))
    def sparsify_tile(_, h_gmem, values_gmem, metadata_gmem, stats_gmem, row, column):
        tile = Tile(Thread.current(), row.registers.item(), column.registers.item())
        rows = [squared_relu(run) for run in tile.load(h_gmem)]
        pairs = [[two_of_four(four) for four in groups(row)] for row in rows]
        tile.store_pairs(values_gmem, pairs)
        tile.store_word(metadata_gmem, pairs)
        kept = [value for row in pairs for pair in row for value in (pair.low, pair.high)]
        tile_number = arith.addi(arith.muli(tile.row, i32(column_tiles)), tile.column)
        y = [value for row in rows for value in row]
        store_stats(stats_gmem, tile_number, HiddenStats(count_nonzeros(y), energy(y), energy(kept)))

    def kernel(h_gmem, values_gmem, metadata_gmem, stats_gmem):
        tile = lax.axis_index("row"), lax.axis_index("column")
        sparsify_tile(h_gmem, values_gmem, metadata_gmem, stats_gmem, *tile)

    values, metadata, stats = plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(column_tiles, row_tiles),
        grid_names=("column", "row"),
        compiler_params=COMPILER_PARAMS,
        kernel_name="squared_relu_24",
    )(padded)
    return Sparse24(values, metadata, h.shape), HiddenStats(*jnp.sum(stats, axis=(0, 1)))


def check_dtype(dtype: jnp.dtype) -> None:
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"takes bfloat16 or float16, not {dtype}")


def squared_relu(run: list[ir.Value]) -> list[ir.Value]:
    """relu(h)^2 of 16-bit floats, rounded to their dtype, as float32. NaN stays NaN."""
    relus = [arith.maximumf(h, f32(0.0)) for h in widen(run)]
    return widen(narrow([arith.mulf(h, h) for h in relus], run[0].type))


def count_nonzeros(values: list[ir.Value]) -> ir.Value:
    return sum_of(
        [arith.select(arith.cmpf(arith.CmpFPredicate.UNE, x, f32(0.0)), f32(1.0), f32(0.0)) for x in values]
    )  # fmt: skip


def energy(values: list[ir.Value]) -> ir.Value:
    return sum_of([arith.mulf(x, x) for x in values])


def store_stats(stats: ir.Value, block: ir.Value, sums: HiddenStats) -> None:
    """A block's sums, by warp, to stats [blocks, warps, 3], of the sums of its threads."""
    warps = ir.MemRefType(stats.type).shape[1]
    warp = arith.divui(mgpu_utils.thread_idx(), i32(32))
    first = mul64(arith.addi(arith.muli(block, i32(warps)), warp), STATS)
    for number, total in enumerate(sums):
        # Every lane holds the sum: all write the same.
        index = arith.addi(first, i64(number))
        pointer = mgpu_utils.getelementptr(global_pointer(stats), [index], ir.F32Type.get())
        llvm.store(warp_sum(total), pointer)
