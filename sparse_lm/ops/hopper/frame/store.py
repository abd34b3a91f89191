"""Stores a warpgroup's registers to global memory, through shared memory, the staging.

TMA does so, but on Hopper it stores boxes only: rows that go where a list says come back from shared memory in chunks
of 16 bytes, eight lanes a row. A warp stores 128 neighbouring bytes each of four rows at a time, whole lines of the
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir

from sparse_lm.ops.hopper.frame import compat, emit
from sparse_lm.ops.hopper.frame.emit import SCALAR, WARP_SIZE
from sparse_lm.ops.hopper.frame.gather import load_number, shuffle
from sparse_lm.ops.hopper.frame.operands import swizzled
from sparse_lm.ops.hopper.frame.tiling import CONSUMERS
from sparse_lm.ops.hopper.frame.wgmma_sp import ROWS

_SWIZZLE = 128  # bytes, of a row of a staging slot
_CHUNK = 16  # bytes that the swizzle keeps together
_CHUNKS = _SWIZZLE // _CHUNK  # of a row; a lane moves one
_SLOTS = 2  # of a warpgroup: one is written while slower threads read the other
_WARP_ROWS = 16  # of a part, which a warp holds in layout WGMMA
_ROWS_AT_A_TIME = WARP_SIZE // _CHUNKS

Store = Callable[[Array, Any, Sequence[Any], Any, tuple[Array, Array], int], None]
"""Called with a part [64, columns] of a consumer's tile, rounded, in layout WGMMA; the consumer's staging; the operands
and the result in global memory; the part's first row and column in the product; and its number in the tile."""


def staging(dtype: jnp.dtype, *, transposed: bool) -> Any:
    """Allocates scratch [consumers, slots, ...] for `store_tile`, which takes one consumer's part."""
    columns = columns_of_store(dtype)
    tile = (columns, ROWS) if transposed else (ROWS, columns)
    return plgpu.SMEM((CONSUMERS, _SLOTS, *tile), dtype, transforms=swizzled(dtype))


def columns_of_store(dtype: jnp.dtype) -> int:
    """Counts the columns of the accumulator that `store_tile` stores at a time: a row of the swizzle."""
    return _SWIZZLE // jnp.dtype(dtype).itemsize


def store_tile(
    tile: Array, slots: Any, out: Any, origin: tuple[Array, Array], first_store: Array | int, *, transposed: bool
) -> None:
    """Starts copying tile [64, n] to `out[row:, column:]`, or to `out[column:, row:]` if `transposed`.

    The tile is in layout WGMMA and the dtype of `out`. What lies out of bounds is dropped.

    `slots` are this warpgroup's of `staging`. They take turns from store `first_store` on, counted from where all were
    known to be free. The copies read them after this returns.
    """
    row, column = origin
    count = slots.shape[0]
    columns = columns_of_store(tile.dtype)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(swizzled(tile.dtype))))
    def write(_, part, ref):
        _write_tile(part, ref, transposed=transposed)

    for i in range(tile.shape[1] // columns):
        slot = slots.at[lax.rem(first_store + i, count)]
        plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)
        write(tile[:, i * columns : (i + 1) * columns], slot)
        plgpu.commit_smem()
        rows, cols = pl.ds(row, ROWS), pl.ds(column + i * columns, columns)
        target = out.at[cols, rows] if transposed else out.at[rows, cols]
        plgpu.copy_smem_to_gmem(slot, target)


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
        own_number = load_number(numbers, emit.i32(0), index)
        _write_tile(part, slot, transposed=False)
        mgpu_utils.warpgroup_barrier()
        in_width = column.compare("ult", width)
        height_here = emit.select(in_width, emit.i32(height), emit.i32(0))  # past the last column, no row exists
        row, chunk = lane // _CHUNKS, lane % _CHUNKS
        own_column = column + chunk * (_CHUNK // mgpu_utils.bytewidth(emit.element_of(out_gmem)))
        for first in range(0, _WARP_ROWS, _ROWS_AT_A_TIME):
            row_of_warp = row + first
            number = shuffle(own_number, row_of_warp)
            start = number.wide() * width + own_column.wide()
            pointer = emit.global_memory(out_gmem).at(start)
            exists = number.compare("ult", height_here)
            emit.store_if(exists, pointer, _load_chunk(slot, warp_row + row_of_warp, chunk))

    def store(part, slots, operands, out_gmem, origin, number):
        # Of two slots that take turns, one may be written while slower threads still read the other.
        write(part, slots.at[number % slots.shape[0]], operands[-1], out_gmem, *origin)

    return store


def _write_tile(part: mgpu.FragmentedArray, ref: ir.Value, *, transposed: bool) -> None:
    """Writes a warpgroup's registers, in layout WGMMA, to one slot of its staging; part of an `inline_mgpu`."""
    if transposed:
        ref = mgpu_utils.memref_transpose(ref, (1, 0, 3, 2))
        if part.mlir_dtype == ir.F32Type.get() or not compat.TRANSPOSES:
            # Two neighbours in a row are no vector in a column: store single elements.
            part = part.to_layout(mgpu.fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
    part.store_tiled(ref, swizzle=_SWIZZLE)


def _load_chunk(slot: ir.Value, row: emit.Number, chunk: emit.Number) -> list[emit.Number]:
    """Loads four words, chunk `chunk` of a row of a staging slot, whose chunks are swizzled by the row within eight."""
    swizzled = chunk ^ (row & (_CHUNKS - 1))
    offset = row * _SWIZZLE + swizzled * _CHUNK
    return emit.load_vector(emit.shared_memory(slot, ir.IntegerType.get_signless(8)).at(offset), emit.i32_type())
