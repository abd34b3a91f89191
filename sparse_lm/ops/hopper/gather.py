"""Scattered rows of a matrix in global memory to the tile that wgmma reads, with `cp.async`.

TMA on Hopper copies boxes only. A warp here copies a row of 256 columns at a time, 16 bytes a lane,
to where the 128-byte swizzle wants it. The row numbers of a step are loaded one step ahead, one a
lane, and broadcast by shuffles, so that no copy waits for its address.
"""

from __future__ import annotations

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from sparse_lm.ops.hopper.wgmma_sp import DENSE_TRANSFORMS, STEP

COLUMNS = 256  # of a gathered tile

_WARPS = 4
_ROWS = STEP // _WARPS  # of a warp
_LANE_COLUMNS = 8  # 16 bytes
_SCALAR = plgpu.Layout.WG_SPLAT(())
_ROW_NUMBERS = plgpu.Layout.WG_STRIDED((128,), 1)


def load_row_numbers(rows: Any, block: Array, step: Array) -> Array:
    """The 64 row numbers `rows[block, 64 * step :]`, int32[128]: lane l of warp w holds number 16 w + l % 16."""
    width = rows.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_ROW_NUMBERS),
    )
    def emit(_, rows, block, step):
        i32 = ir.IntegerType.get_signless(32)
        warp, lane = _warp_and_lane()
        first = arith.addi(_times(block.registers.item(), width), _times(step.registers.item(), STEP))
        index = arith.addi(arith.addi(first, _times(warp, _ROWS)), arith.remui(lane, mgpu_utils.c(_ROWS, i32)))
        address = mgpu_utils.getelementptr(global_pointer(rows), [index], i32)
        number = llvm.inline_asm(i32, [address], "ld.global.nc.b32 $0, [$1];", "=r,l", has_side_effects=True)
        vector = llvm.insertelement(llvm.mlir_undef(ir.VectorType.get((1,), i32)), number, mgpu_utils.c(0, i32))
        registers = np.array([vector], dtype=object)
        layout = mgpu.WGStridedFragLayout(shape=(128,), vec_size=1)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return emit(rows, block, step)


def start_gather(source: Any, target: Any, row_numbers: Array, column: Array) -> None:
    """Starts copying `source[row, column : column + 256]` of the 64 row numbers to `target`.

    Rows past the end of the source, and columns past it, come as zeros.

    Args:
      source: global memory [K, N] of 16-bit elements, N a multiple of 8.
      target: shared memory [64, 256] with `DENSE_TRANSFORMS`.
      row_numbers: of `load_row_numbers`.
      column: the first.
    """
    height, width = source.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(DENSE_TRANSFORMS), _ROW_NUMBERS, _SCALAR))
    def emit(_, source, target, row_numbers, column):
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        element = ir.MemRefType(source.type).element_type
        c = mgpu_utils.c
        warp, lane = _warp_and_lane()
        own_number = llvm.extractelement(row_numbers.registers.item(), c(0, i32))
        first_column = arith.addi(column.registers.item(), _times(lane, _LANE_COLUMNS))
        in_width = arith.cmpi(arith.CmpIPredicate.ult, first_column, c(width, i32))
        first_column = arith.extui(i64, first_column)
        # The tile is [k / 8, n / 64, 8, 64]; chunks of 8 columns are swizzled by the row within 8.
        chunk = arith.remui(lane, c(8, i32))
        tile_column = _times(arith.divui(lane, c(8, i32)), 8 * 64)
        warp_offset = arith.addi(_times(warp, _ROWS * COLUMNS), tile_column)
        for i in range(_ROWS):
            shuffle = f"shfl.sync.idx.b32 $0, $1, {i}, 31, 0xffffffff;"
            number = llvm.inline_asm(i32, [own_number], shuffle, "=r,r", has_side_effects=True)
            offset = arith.addi(arith.muli(arith.extui(i64, number), c(width, i64)), first_column)
            exists = arith.andi(in_width, arith.cmpi(arith.CmpIPredicate.ult, number, c(height, i32)))
            swizzled = _times(arith.xori(chunk, c(i % 8, i32)), _LANE_COLUMNS)
            row_offset = c(i // 8 * 8 * COLUMNS + i % 8 * 64, i32)
            target_offset = arith.addi(arith.addi(warp_offset, row_offset), swizzled)
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [
                    mgpu_utils.getelementptr(mgpu_utils.memref_ptr(target), [target_offset], element),
                    mgpu_utils.getelementptr(global_pointer(source), [offset], element),
                    arith.select(exists, c(16, i32), c(0, i32)),  # bytes read; the rest of the 16 is zeros
                ],
                "cp.async.cg.shared.global [$0], [$1], 16, $2;",
                "l,l,r",
                has_side_effects=True,
            )

    emit(source, target, row_numbers, column)


def _warp_and_lane() -> tuple[ir.Value, ir.Value]:
    """Of this thread in its warpgroup."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(mgpu_utils.thread_idx(), mgpu_utils.c(128, i32))
    return arith.divui(thread, mgpu_utils.c(32, i32)), arith.remui(thread, mgpu_utils.c(32, i32))


def _times(value: ir.Value, factor: int) -> ir.Value:
    return arith.muli(value, mgpu_utils.c(factor, ir.IntegerType.get_signless(32)))


def global_pointer(ref: ir.Value) -> ir.Value:
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu_utils.memref_ptr(ref))
