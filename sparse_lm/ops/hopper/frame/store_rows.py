"""An epilogue (persistent.py) that puts the rows of a product where a list says.

TMA on Hopper stores boxes only. Here the rows take the way through shared memory, and come back in chunks
of 16 bytes, eight lanes a row: a warp stores 128 neighbouring bytes each of four rows at a time, whole
lines of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from sparse_lm.ops.hopper.frame import gather
from sparse_lm.ops.hopper.frame.emit import (
    SCALAR,
    WARP_SIZE,
    global_pointer,
    i32,
    i64_type,
    mul64,
    store_if,
    times,
)
from sparse_lm.ops.hopper.frame.store import SWIZZLE, SWIZZLE_CHUNK, load_chunk, transforms, write_tile
from sparse_lm.ops.hopper.frame.tiling import Epilogue

_CHUNKS = SWIZZLE // SWIZZLE_CHUNK  # of a row; a lane moves one
_WARP_ROWS = 16  # of a part, which a warp holds in layout WGMMA
_ROWS_AT_A_TIME = WARP_SIZE // _CHUNKS


def store_rows(out: jax.ShapeDtypeStruct) -> Epilogue:
    """Stores row t of the product in row `numbers[0, t]` of `out`, where there is such a row.

    Args:
      out: [rows, columns], of columns that whole parts cover; `numbers`, int32 [1, T], is the last operand.
    """

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA,
            plgpu.RefType(transforms(out.dtype)),
            plgpu.RefType(),
            plgpu.RefType(),
            SCALAR,
            SCALAR,
        )
    )
    def write(_, part, slot, numbers, out_gmem, row, column):
        _write(part, slot, numbers, out_gmem, row.registers.item(), column.registers.item(), out.shape)

    def store(
        part: Array,
        slots: Any,
        operands: Sequence[Any],
        outs: Sequence[Any],
        origin: tuple[Array, Array],
        number: int,
    ) -> None:
        # Of two slots that take turns, one may be written while slower threads still read the other.
        write(part, slots.at[number % slots.shape[0]], operands[-1], *outs, *origin)

    return Epilogue((out,), store)


def _write(
    part: mgpu.FragmentedArray,
    slot: ir.Value,
    numbers: ir.Value,
    out: ir.Value,
    first_row: ir.Value,
    column: ir.Value,
    shape: tuple[int, int],
) -> None:
    height, width = shape
    element = ir.MemRefType(out.type).element_type
    warp, lane = gather.warp_and_lane()
    warp_row = times(warp, _WARP_ROWS)
    index = arith.addi(arith.addi(first_row, warp_row), arith.remui(lane, i32(_WARP_ROWS)))
    # One number a lane, on its way from the cache while the part is written, and exchanged by shuffles.
    own_number = gather.load_number(numbers, i32(0), index, ir.MemRefType(numbers.type).shape[1])
    write_tile(part, slot, transposed=False)
    mgpu_utils.warpgroup_barrier()
    in_width = arith.cmpi(arith.CmpIPredicate.ult, column, i32(width))
    height_here = arith.select(in_width, i32(height), i32(0))  # past the last column, no row exists
    row, chunk = arith.divui(lane, i32(_CHUNKS)), arith.remui(lane, i32(_CHUNKS))
    own_column = arith.addi(column, times(chunk, SWIZZLE_CHUNK // mgpu_utils.bytewidth(element)))
    for first in range(0, _WARP_ROWS, _ROWS_AT_A_TIME):
        row_of_warp = arith.addi(row, i32(first))
        number = gather.shuffle(own_number, row_of_warp)
        start = arith.addi(mul64(number, width), arith.extui(i64_type(), own_column))
        pointer = mgpu_utils.getelementptr(global_pointer(out), [start], element)
        exists = arith.cmpi(arith.CmpIPredicate.ult, number, height_here)
        store_if(exists, pointer, load_chunk(slot, arith.addi(warp_row, row_of_warp), chunk))
