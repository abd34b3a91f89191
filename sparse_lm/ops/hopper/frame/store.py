"""Stores a warpgroup's registers to global memory, through shared memory, the staging, with TMA or otherwise."""

from __future__ import annotations

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir

from sparse_lm.ops.hopper.frame import compat
from sparse_lm.ops.hopper.frame.emit import Number, i32_type, load_vector, shared_memory
from sparse_lm.ops.hopper.frame.operands import swizzled
from sparse_lm.ops.hopper.frame.tiling import CONSUMERS
from sparse_lm.ops.hopper.frame.wgmma_sp import ROWS

SWIZZLE = 128  # bytes, of a row of a staging slot
SWIZZLE_CHUNK = 16  # bytes that the swizzle keeps together
_SLOTS = 2  # of a warpgroup: one is written while slower threads read the other


def staging(dtype: jnp.dtype, *, transposed: bool) -> Any:
    """Allocates scratch [consumers, slots, ...] for `store_tile`, which takes one consumer's part."""
    columns = columns_of_store(dtype)
    tile = (columns, ROWS) if transposed else (ROWS, columns)
    return plgpu.SMEM((CONSUMERS, _SLOTS, *tile), dtype, transforms=swizzled(dtype))


def columns_of_store(dtype: jnp.dtype) -> int:
    """Counts the columns of the accumulator that `store_tile` stores at a time: a row of the swizzle."""
    return SWIZZLE // jnp.dtype(dtype).itemsize


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
        write_tile(part, ref, transposed=transposed)

    for i in range(tile.shape[1] // columns):
        slot = slots.at[lax.rem(first_store + i, count)]
        plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)
        write(tile[:, i * columns : (i + 1) * columns], slot)
        plgpu.commit_smem()
        rows, cols = pl.ds(row, ROWS), pl.ds(column + i * columns, columns)
        target = out.at[cols, rows] if transposed else out.at[rows, cols]
        plgpu.copy_smem_to_gmem(slot, target)


def write_tile(part: mgpu.FragmentedArray, ref: ir.Value, *, transposed: bool) -> None:
    """Writes a warpgroup's registers, in layout WGMMA, to one slot of its staging; part of an `inline_mgpu`."""
    if transposed:
        ref = mgpu_utils.memref_transpose(ref, (1, 0, 3, 2))
        if part.mlir_dtype == ir.F32Type.get() or not compat.TRANSPOSING_STORES:
            # Two neighbours in a row are no vector in a column: store single elements.
            part = part.to_layout(mgpu.fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
    part.store_tiled(ref, swizzle=SWIZZLE)


def load_chunk(slot: ir.Value, row: Number, chunk: Number) -> list[Number]:
    """Loads four words, chunk `chunk` of a row of a staging slot, whose chunks are swizzled by the row within eight."""
    swizzled = chunk ^ (row & (SWIZZLE // SWIZZLE_CHUNK - 1))
    offset = row * SWIZZLE + swizzled * SWIZZLE_CHUNK
    return load_vector(shared_memory(slot, ir.IntegerType.get_signless(8)).at(offset), 4, i32_type())
