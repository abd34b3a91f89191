"""A `Store` of persistent.py that puts the rows of a product where a list says.

TMA on Hopper stores boxes only. Here the rows take the way through shared memory, and come back in chunks
of 16 bytes, eight lanes a row: a warp stores 128 neighbouring bytes each of four rows at a time, whole
lines of the cache.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from sparse_lm.ops.hopper.frame import emit
from sparse_lm.ops.hopper.frame.emit import SCALAR, WARP_SIZE
from sparse_lm.ops.hopper.frame.gather import load_number, shuffle
from sparse_lm.ops.hopper.frame.operands import swizzled
from sparse_lm.ops.hopper.frame.persistent import Store
from sparse_lm.ops.hopper.frame.store import SWIZZLE, SWIZZLE_CHUNK, load_chunk, write_tile

_CHUNKS = SWIZZLE // SWIZZLE_CHUNK  # of a row; a lane moves one
_WARP_ROWS = 16  # of a part, which a warp holds in layout WGMMA
_ROWS_AT_A_TIME = WARP_SIZE // _CHUNKS


def store_rows(out: jax.ShapeDtypeStruct) -> Store:
    """Stores row t of the product in row `numbers[0, t]` of `out`, where there is such a row.

    Whole parts cover the columns of `out`. `numbers`, int32 [1, T], is the last operand.
    """
    height, width = out.shape
    staged = plgpu.RefType(swizzled(out.dtype))

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, staged, plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR))
    def write(_, part, slot, numbers, out_gmem, first_row, column):
        first_row, column = emit.scalar(first_row), emit.scalar(column)
        warp, lane = emit.warp_and_lane()
        warp_row = warp * _WARP_ROWS
        index = first_row + warp_row + lane % _WARP_ROWS
        # One number a lane, on its way from the cache while the part is written, and exchanged by shuffles.
        own_number = load_number(numbers, emit.i32(0), index, emit.shape_of(numbers)[1])
        write_tile(part, slot, transposed=False)
        mgpu_utils.warpgroup_barrier()
        in_width = column.compare("ult", width)
        height_here = emit.select(in_width, emit.i32(height), emit.i32(0))  # past the last column, no row exists
        row, chunk = lane // _CHUNKS, lane % _CHUNKS
        own_column = column + chunk * (SWIZZLE_CHUNK // mgpu_utils.bytewidth(emit.element_of(out_gmem)))
        for first in range(0, _WARP_ROWS, _ROWS_AT_A_TIME):
            row_of_warp = row + first
            number = shuffle(own_number, row_of_warp)
            start = number.wide() * width + own_column.wide()
            pointer = emit.global_memory(out_gmem).at(start)
            exists = number.compare("ult", height_here)
            emit.store_if(exists, pointer, load_chunk(slot, warp_row + row_of_warp, chunk))

    def store(part, slots, operands, out_gmem, origin, number):
        # Of two slots that take turns, one may be written while slower threads still read the other.
        write(part, slots.at[number % slots.shape[0]], operands[-1], out_gmem, *origin)

    return store
