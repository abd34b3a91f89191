"""Gathers rows of a matrix in global memory into the tile that wgmma reads, with `cp.async`.

TMA on Hopper copies boxes only. Here a warp copies 64 columns of four rows at a time, 16 bytes a lane, to where
the 128-byte swizzle wants them. The row numbers of a step are loaded some steps ahead, one a lane, and handed
out by shuffles, so that no copy waits for its address: one shuffle for all columns of four rows, since shuffles
pass through shared memory's unit, which limits the products.
"""

from __future__ import annotations

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from sparse_lm.ops.hopper.frame import emit
from sparse_lm.ops.hopper.frame.emit import SCALAR, WARP_SIZE, WARPGROUP_SIZE, Number
from sparse_lm.ops.hopper.frame.wgmma_sp import DENSE_TRANSFORMS, STEP

_ROWS = STEP // (WARPGROUP_SIZE // WARP_SIZE)  # of a warp
CHUNK = 8  # elements of 16 bytes, which a thread copies at a time
_LINE = 64  # elements of a row that a copy takes: the 128 bytes that lie together in the tile
_CHUNKS = _LINE // CHUNK  # of a line, and so the lanes that copy it
_ROWS_AT_ONCE = WARP_SIZE // _CHUNKS


def load_row_numbers(rows: Any, block: Array, step: Array) -> Array:
    """Loads the 64 row numbers `rows[block, 64 * step :]`, int32[128]: lane l of warp w holds number 16 w + l % 16."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=per_thread_type(1))
    def inline(_, rows, block, step):
        warp, lane = emit.warp_and_lane()
        index = warp * _ROWS + lane % _ROWS
        index = emit.scalar(step) * STEP + index
        return per_thread([load_number(rows, emit.scalar(block), index)])

    return inline(rows, block, step)


def load_number(rows: ir.Value, block: Number, index: Number) -> Number:
    """Loads rows[block, index] of int32 in global memory; the largest unsigned number, no row, past the columns."""
    _, width = emit.shape_of(rows)
    address = emit.global_memory(rows).at(block * width + index)
    code = "{ .reg .pred p; mov.b32 $0, -1; setp.lt.u32 p, $2, $3; @p ld.global.nc.b32 $0, [$1]; }"
    return emit.ptx(code, "=&r,l,r,r", [address, index, emit.i32(width)], emit.i32_type())


def per_thread_type(count: int) -> plgpu.ShapeDtypeStruct:
    """Returns the type of so many numbers of each thread's own, int32[128 * count]."""
    shape = (WARPGROUP_SIZE * count,)
    return plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=plgpu.Layout.WG_STRIDED(shape, 1))


def per_thread(numbers: list[Number]) -> mgpu.FragmentedArray:
    """Makes an array of `per_thread_type` of each thread's own numbers."""
    registers = np.empty((len(numbers),), dtype=object)
    registers[:] = [emit.vector([number]) for number in numbers]
    layout = mgpu.WGStridedFragLayout(shape=(WARPGROUP_SIZE * len(numbers),), vec_size=1)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def own_numbers(array: mgpu.FragmentedArray) -> list[Number]:
    """Inverts `per_thread`."""
    return [Number(llvm.extractelement(register, emit.i32(0))) for register in array.registers.flat]


def start_gather(source: Any, target: Any, row_numbers: Array, column: Array) -> None:
    """Starts copying `source[row, column : column + n]` of the 64 row numbers to `target`.

    Rows past the end of the source, and columns past it, come as zeros. `row_numbers` are of `load_row_numbers`. The
    source is [K, N] of 16-bit elements, the target [64, n] with `DENSE_TRANSFORMS`; N and n are multiples of 64.
    """
    (height, width), target_columns = source.shape, target.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(DENSE_TRANSFORMS), per_thread_type(1).layout, SCALAR))
    def inline(_, source, target, row_numbers, column):
        (own_number,) = own_numbers(row_numbers)
        column = emit.scalar(column)
        warp, lane = emit.warp_and_lane()
        chunks = emit.i32(_CHUNKS)
        row, chunk = lane // chunks, lane % chunks
        lane_column = (column + chunk * CHUNK).wide()
        # The rows that exist at a line's first column: past the last column none. No line lies half inside.
        firsts = (column + first for first in range(0, target_columns, _LINE))
        heights = [emit.select(first.compare("ult", width), emit.i32(height), emit.i32(0)) for first in firsts]
        # The tile is [k / 8, n / 64, 8, 64]; chunks of 8 columns are swizzled by the row within 8.
        lane_offset = warp * (_ROWS * target_columns) + row * _LINE
        lane_swizzle = chunk ^ row
        for first_row in range(0, _ROWS, _ROWS_AT_ONCE):
            number = shuffle(own_number, row + first_row)
            start = number.wide() * width + lane_column
            # The row within 8 is the sum of two numbers without common bits.
            swizzled = (lane_swizzle ^ (first_row % 8)) * CHUNK
            row_offset = emit.i32(first_row // 8 * 8 * target_columns + first_row % 8 * _LINE)
            offset = lane_offset + swizzled + row_offset
            for line, line_height in enumerate(heights):
                target_offset, source_offset = offset + 8 * _LINE * line, start + _LINE * line
                start_copy(
                    emit.shared_memory(target).at(target_offset),
                    emit.global_memory(source).at(source_offset),
                    number.compare("ult", line_height),
                )

    inline(source, target, row_numbers, column)


def start_copy(target: ir.Value, source: ir.Value, exists: Number) -> None:
    """Copies 16 bytes, or makes them zeros and reads nothing if not `exists`."""
    bytes_read = emit.select(exists, emit.i32(16), emit.i32(0))
    emit.ptx("cp.async.cg.shared.global [$0], [$1], 16, $2;", "l,l,r", [target, source, bytes_read])


def shuffle(value: Number, lane: Number) -> Number:
    """Returns the value that another lane of the warp holds."""
    return emit.ptx("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", [value, lane], emit.i32_type())
