"""Y = relu(H)^2 to its 2:4 form in one pass over memory.

Numerics: Y is squared in float32, rounded once, and then selected from: bit for bit the reference.
What selection saw is summed in float32, by warp, then by XLA: in the same order in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math

from sparse_lm.ops.compress import pad_to_tiles
from sparse_lm.ops.formats import TILE, HiddenStats, Sparse24
from sparse_lm.ops.hopper import packed_24
from sparse_lm.ops.hopper.emit import (
    COMPILER_PARAMS,
    SCALAR,
    WARP_SIZE,
    WARPGROUP_SIZE,
    f32,
    global_pointer,
    i32,
    i64,
    mul64,
    warp_sum,
)
from sparse_lm.ops.hopper.thread_tile import Thread, Tile

WARPS = WARPGROUP_SIZE // WARP_SIZE
STATS = len(HiddenStats._fields)


def squared_relu_24(h: Array) -> tuple[Sparse24, HiddenStats]:
    """See `sparse_lm.ops.squared_relu_24`.

    Raises:
      NotImplementedError: h is not of 16-bit floats.
    """
    check_dtype(h.dtype)
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
    """Of `sparsify`, for an H of whole tiles: values, metadata, and what each warp saw of each tile."""
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
        y = [squared_relu(word, ref.element_type) for word in words]
        pairs.append([packed_24.two_of_four(four, signed=False) for four in packed_24.groups(y)])
        seen = seen.add(y, [pair.values for pair in pairs[-1]], ref.element_type)
    tile.store_packed(values, [[pair.values for pair in row] for row in pairs])
    tile.store_word(metadata, pairs)
    column_tiles = ir.MemRefType(metadata.type).shape[1]
    store_stats(stats, arith.addi(arith.muli(tile.row, i32(column_tiles)), tile.column), seen.stats())


def check_dtype(dtype: jnp.dtype) -> None:
    """Raises NotImplementedError for a hidden layer that is not of 16-bit floats."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"takes bfloat16 or float16, not {dtype}")


def squared_relu(word: ir.Value, element: ir.Type) -> ir.Value:
    """relu(h)^2 of two 16-bit floats, rounded to their dtype. NaN stays NaN.

    float32 holds the product of two 16-bit floats exactly, so that the one taken here, rounded once, is the same.
    """
    h = packed_24.as_pair(word, element)
    zero = arith.constant(h.type, ir.DenseElementsAttr.get_splat(h.type, ir.FloatAttr.get(element, 0.0)))
    relu = arith.maximumf(h, zero)
    return packed_24.as_word(arith.mulf(relu, relu))


class Seen(NamedTuple):
    """A thread's part of `HiddenStats`."""

    nonzeros: ir.Value  # an integer
    energy: ir.Value
    kept_energy: ir.Value

    @classmethod
    def nothing(cls) -> Seen:
        """Zeros, to add to."""
        return cls(i32(0), f32(0.0), f32(0.0))

    def add(self, y: Sequence[ir.Value], kept: Sequence[ir.Value], element: ir.Type) -> Seen:
        """Words of Y, and of what is kept of it."""
        nonzeros, energy, kept_energy = self
        nonzeros = arith.addi(nonzeros, count_nonzeros(y))
        for word in y:
            energy = _add_squares(energy, packed_24.unpack(word, element))
        for word in kept:
            kept_energy = _add_squares(kept_energy, packed_24.unpack(word, element))
        return Seen(nonzeros, energy, kept_energy)

    def stats(self) -> HiddenStats:
        """All in float32, of this thread."""
        return HiddenStats(arith.uitofp(ir.F32Type.get(), self.nonzeros), self.energy, self.kept_energy)


def count_nonzeros(words: Sequence[ir.Value]) -> ir.Value:
    """How many halves of up to 16 words, none of them negative, are not +0."""
    bits = i32(0)
    for number, word in enumerate(words):
        carries = arith.andi(arith.addi(word, i32(0x7FFF7FFF)), i32(-0x7FFF8000))  # 0x80008000
        bits = arith.ori(bits, arith.shrui(carries, i32(number)))
    return math.ctpop(bits)


def _add_squares(total: ir.Value, values: Sequence[ir.Value]) -> ir.Value:
    for value in values:
        total = math.fma(value, value, total)
    return total


def store_stats(stats: ir.Value, block: ir.Value, sums: HiddenStats) -> None:
    """A block's sums, by warp, to stats [blocks, warps, 3], of the sums of its threads."""
    warps = ir.MemRefType(stats.type).shape[1]
    warp = arith.remui(arith.divui(mgpu_utils.thread_idx(), i32(WARP_SIZE)), i32(warps))
    first = mul64(arith.addi(arith.muli(block, i32(warps)), warp), STATS)
    for number, total in enumerate(sums):
        # Every lane holds the sum: all write the same.
        index = arith.addi(first, i64(number))
        pointer = mgpu_utils.getelementptr(global_pointer(stats), [index], ir.F32Type.get())
        llvm.store(warp_sum(total), pointer)
