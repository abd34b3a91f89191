"""Compresses a dense matrix and its transpose to 2:4 under one mask of 4 x 4 tiles, from one read.

A block is one warpgroup and takes 64 x 64 entries, which it keeps in shared memory. Each thread reads the masks of two
tiles of 4 x 4, 16 bits each; then every thread takes the survivors of its rows (thread_tile.py), and of its columns,
from shared memory.

Numerics: the reference bit for bit.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from sparse_lm.ops.checks import check_selection_dtypes
from sparse_lm.ops.compress import pad_to_tiles
from sparse_lm.ops.formats import METADATA_OF_MASKS, TILE, Sparse24
from sparse_lm.ops.hopper.frame.emit import (
    COMPILER_PARAMS,
    SCALAR,
    WARPGROUP_SIZE,
    f32,
    global_pointer,
    i32,
    i32_type,
    i64_type,
    mul64,
    widen,
)
from sparse_lm.ops.hopper.frame.thread_tile import HALVES, SHARED_STRIDE, THREAD_COLUMNS, Thread, Tile, load_tile
from sparse_lm.ops.hopper.frame.two_of_four import Pair

_ACROSS = TILE // 4  # tiles of 4 x 4


def sparsify_24_tiles(x: Array, mask: Array, *, dtype: DTypeLike) -> tuple[Sparse24, Sparse24]:
    """See `sparse_lm.ops.sparsify_24_tiles`.

    Raises:
      NotImplementedError: the dtypes.
    """
    dtype = jnp.dtype(dtype)
    check_selection_dtypes(x.dtype, dtype)
    values, metadata, values_t, metadata_t = _call(pad_to_tiles(x), pad_to_tiles(mask), dtype)
    return Sparse24(values, metadata, x.shape), Sparse24(values_t, metadata_t, x.shape[::-1])


def _call(x: Array, mask: Array, dtype: jnp.dtype) -> tuple[Array, ...]:
    """Computes values and metadata of both forms."""
    row_tiles, column_tiles = (size // TILE for size in x.shape)

    def form(rows, columns):
        return (
            jax.ShapeDtypeStruct((rows * TILE, columns * TILE // 2), dtype),
            jax.ShapeDtypeStruct((rows, columns, WARPGROUP_SIZE), jnp.int32),
        )

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 8, SCALAR, SCALAR))
    def sparsify_tile(_, x_gmem, mask_gmem, values, metadata, values_t, metadata_t, tile_smem, masks_smem, row, column):
        tile = Tile(Thread.current(), row.registers.item(), column.registers.item())
        _store_tile(load_tile(x_gmem, tile), tile_smem)
        mgpu_utils.warpgroup_barrier()
        for number in range(_ACROSS * _ACROSS // WARPGROUP_SIZE):
            place = arith.addi(tile.thread.index, i32(WARPGROUP_SIZE * number))
            llvm.store(_load_mask(mask_gmem, tile, place), _mask_pointer(masks_smem, place))
        mgpu_utils.warpgroup_barrier()
        tile_t = Tile(tile.thread, tile.column, tile.row)
        for form, out, words, transposed in ((tile, values, metadata, False), (tile_t, values_t, metadata_t, True)):
            pairs = [_survivors(tile_smem, masks_smem, tile.thread, half, transposed) for half in HALVES]
            form.store_pairs(out, pairs)
            form.store_word(words, pairs)

    def kernel(*refs):
        sparsify_tile(*refs, lax.axis_index("row"), lax.axis_index("column"))

    return plgpu.kernel(
        kernel,
        out_type=(*form(row_tiles, column_tiles), *form(column_tiles, row_tiles)),
        grid=(column_tiles, row_tiles),
        grid_names=("column", "row"),
        scratch_types=[plgpu.SMEM((TILE, SHARED_STRIDE), x.dtype), plgpu.SMEM((_ACROSS * _ACROSS,), jnp.int32)],
        compiler_params=COMPILER_PARAMS,
        kernel_name="sparsify_24_tiles",
    )(x, mask)


def _store_tile(loaded: tuple, tile_smem: ir.Value) -> None:
    """Stores what `load_tile` gave in shared memory."""
    row, column, rows = loaded
    for first, entries in rows:
        for i, entry in enumerate(entries):
            llvm.store(entry, _entry(tile_smem, arith.addi(row, i32(first)), arith.addi(column, i32(i))))


def _origin(place: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns first row and column of a tile of 4 x 4."""
    return tuple(
        arith.muli(index, i32(4)) for index in (arith.divui(place, i32(_ACROSS)), arith.remui(place, i32(_ACROSS)))
    )


def _load_mask(mask: ir.Value, tile: Tile, place: ir.Value) -> ir.Value:
    """Loads the 16 bits of a tile of 4 x 4, row by row, from a matrix of bytes that are 0 or 1."""
    width = ir.MemRefType(mask.type).shape[1]
    first_row, first_column = _origin(place)
    row = arith.addi(arith.muli(tile.row, i32(TILE)), first_row)
    column = arith.addi(arith.muli(tile.column, i32(TILE)), first_column)
    bits = i32(0)
    for i in range(4):
        start = arith.addi(mul64(arith.addi(row, i32(i)), width), arith.extui(i64_type(), column))
        pointer = mgpu_utils.getelementptr(global_pointer(mask), [start], ir.IntegerType.get_signless(8))
        # The product has the lowest bits of the four bytes side by side in bits 24 to 27.
        product = arith.muli(llvm.load(i32_type(), pointer, alignment=4), i32(0x01020408))
        of_row = arith.andi(arith.shrui(product, i32(24)), i32(15))
        bits = arith.ori(bits, arith.shli(of_row, i32(4 * i)))
    return bits


def _survivors(tile_smem: ir.Value, masks_smem: ir.Value, thread: Thread, half: int, transposed: bool) -> list[Pair]:
    """Selects from the 16 entries of one of the thread's rows; or, `transposed`, of its column of that number."""
    line = arith.addi(thread.row, i32(8 * half))
    pairs = []
    for first in range(0, THREAD_COLUMNS, 4):
        start = arith.addi(thread.column, i32(first))
        row, column = (start, line) if transposed else (line, start)
        place = arith.addi(arith.muli(arith.shrui(row, i32(2)), i32(_ACROSS)), arith.shrui(column, i32(2)))
        mask = llvm.load(i32_type(), _mask_pointer(masks_smem, place))
        within = arith.andi(line, i32(3))
        if transposed:
            # The product has the bits of the tile's column side by side in bits 12 to 15.
            product = arith.muli(arith.andi(arith.shrui(mask, within), i32(0x1111)), i32(0x1248))
            mask = arith.andi(arith.shrui(product, i32(12)), i32(15))
        else:
            mask = arith.andi(arith.shrui(mask, arith.shli(within, i32(2))), i32(15))
        nibble = _nibble(mask)

        def survivor(position, start=start, mask=mask):
            place = arith.addi(start, position)
            entry = _load_entry(tile_smem, *((place, line) if transposed else (line, place)))
            is_kept = arith.trunci(ir.IntegerType.get_signless(1), arith.shrui(mask, position))
            return arith.select(is_kept, entry, f32(0.0))

        pairs.append(Pair(survivor(arith.andi(nibble, i32(3))), survivor(arith.shrui(nibble, i32(2))), nibble))
    return pairs


def _nibble(mask: ir.Value) -> ir.Value:
    """Computes a group's metadata from the four bits of its mask."""
    i64 = i64_type()
    signed = METADATA_OF_MASKS - (1 << 64) if METADATA_OF_MASKS >> 63 else METADATA_OF_MASKS
    table = arith.constant(i64, ir.IntegerAttr.get(i64, signed))
    entry = arith.shrui(table, arith.extui(i64, arith.shli(mask, i32(2))))
    return arith.andi(arith.trunci(i32_type(), entry), i32(15))


def _load_entry(tile_smem: ir.Value, row: ir.Value, column: ir.Value) -> ir.Value:
    """Loads an entry of the tile in float32."""
    element = ir.MemRefType(tile_smem.type).element_type
    return widen([llvm.load(element, _entry(tile_smem, row, column))])[0]


def _entry(tile_smem: ir.Value, row: ir.Value, column: ir.Value) -> ir.Value:
    index = arith.addi(arith.muli(row, i32(SHARED_STRIDE)), column)
    return mgpu_utils.getelementptr(
        mgpu_utils.memref_ptr(tile_smem), [index], ir.MemRefType(tile_smem.type).element_type
    )


def _mask_pointer(masks_smem: ir.Value, place: ir.Value) -> ir.Value:
    return mgpu_utils.getelementptr(mgpu_utils.memref_ptr(masks_smem), [place], i32_type())
