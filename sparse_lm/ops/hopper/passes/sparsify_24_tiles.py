"""Compresses a dense matrix and its transpose to 2:4 under one mask of 4 x 4 tiles, from one read.

A block is one warpgroup and takes 64 x 64 entries, which it keeps in shared memory. Each thread reads the masks of two
tiles of 4 x 4, 16 bits each; then every thread takes the survivors of its rows (thread_tile.py), and of its columns,
from shared memory.

Numerics: the reference bit for bit.
"""

from __future__ import annotations

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from sparse_lm.ops.checks import check_selection_dtypes
from sparse_lm.ops.compress import pad_to_tiles
from sparse_lm.ops.formats import METADATA_OF_MASKS, TILE, Sparse24, types_24
from sparse_lm.ops.hopper.frame import emit, packed_24
from sparse_lm.ops.hopper.frame.emit import WARPGROUP_SIZE, Number
from sparse_lm.ops.hopper.frame.packed_24 import PackedPair
from sparse_lm.ops.hopper.frame.thread_tile import HALVES, SHARED_STRIDE, THREAD_COLUMNS, Tile, copy_tile, run_by_tile

_ACROSS = TILE // 4  # tiles of 4 x 4
_TOO_MANY = sum((mask.bit_count() > 2) << mask for mask in range(16))  # bit i: mask i of a group has more than two


def sparsify_24_tiles(x: Array, mask: Array, *, dtype: DTypeLike) -> tuple[Sparse24, Sparse24]:
    """See `sparse_lm.ops.sparsify_24_tiles`; refuses the dtypes that `sparsify_24` does."""
    check_selection_dtypes(x.dtype, dtype)
    x_padded = pad_to_tiles(x)
    rows, columns = x_padded.shape

    def sparsify_tile(tile, x_gmem, mask_gmem, values, metadata, values_t, metadata_t, tile_smem, masks_smem):
        copy_tile(x_gmem, tile, tile_smem)
        for number in range(_ACROSS * _ACROSS // WARPGROUP_SIZE):
            place = tile.thread.index + WARPGROUP_SIZE * number
            mask = _load_mask(mask_gmem, tile, place)
            emit.shared_memory(masks_smem).store(place, mask)
        mgpu_utils.warpgroup_barrier()
        tile_t = Tile(tile.thread, tile.column, tile.row)
        for form, out, words, transposed in ((tile, values, metadata, False), (tile_t, values_t, metadata_t, True)):
            pairs = [_survivors(tile_smem, masks_smem, tile, half, transposed, emit.element_of(out)) for half in HALVES]
            form.store_24(out, words, pairs)

    values, metadata, values_t, metadata_t = run_by_tile(
        sparsify_tile,
        [x_padded, pad_to_tiles(mask)],
        (*types_24(rows, columns, dtype), *types_24(columns, rows, dtype)),
        (rows // TILE, columns // TILE),
        scratch=[plgpu.SMEM((TILE, SHARED_STRIDE), x.dtype), plgpu.SMEM((_ACROSS * _ACROSS,), jnp.int32)],
        name="sparsify_24_tiles",
    )
    return Sparse24(values, metadata, x.shape), Sparse24(values_t, metadata_t, x.shape[::-1])


def _load_mask(mask: ir.Value, tile: Tile, place: Number) -> Number:
    """Loads the 16 bits of a tile of 4 x 4, row by row, from a matrix of bytes that are 0 or 1."""
    across, along = place // _ACROSS, place % _ACROSS
    first_row, first_column = across * 4, along * 4
    row, column = tile.row * TILE + first_row, tile.column * TILE + first_column
    bits = emit.i32(0)
    for i in range(4):
        start = (row + i).wide() * emit.shape_of(mask)[1] + column.wide()
        pointer = emit.global_memory(mask, ir.IntegerType.get_signless(8)).at(start)
        # The product has the lowest bits of the four bytes side by side in bits 24 to 27.
        product = Number(llvm.load(emit.i32_type(), pointer, alignment=4)) * 0x01020408
        bits = bits | ((product >> 24) & 15) << 4 * i
    return bits


def _survivors(
    tile_smem: ir.Value, masks_smem: ir.Value, tile: Tile, half: int, transposed: bool, element: ir.Type
) -> list[PackedPair]:
    """Selects from the 16 entries of one of the thread's rows; or, `transposed`, of its column of that number."""
    line = tile.thread.row + 8 * half
    pairs = []
    for first in range(0, THREAD_COLUMNS, 4):
        start = tile.thread.column + first
        row, column = (start, line) if transposed else (line, start)
        place = (row >> 2) * _ACROSS + (column >> 2)
        mask = emit.shared_memory(masks_smem).load(place)
        within = line & 3
        if transposed:
            # The product has the bits of the tile's column side by side in bits 12 to 15.
            product = ((mask >> within) & 0x1111) * 0x1248
            mask = (product >> 12) & 15
        else:
            mask = (mask >> (within << 2)) & 15
        shifted = Number(arith.constant(emit.i64_type(), METADATA_OF_MASKS)) >> (mask << 2).wide()
        nibble = Number(arith.trunci(emit.i32_type(), shifted)) & 15
        has_too_many = _bit(emit.i32(_TOO_MANY) >> mask)

        def survivor(position, start=start, mask=mask, has_too_many=has_too_many):
            place = start + position
            index = place * SHARED_STRIDE + line if transposed else line * SHARED_STRIDE + place
            (entry,) = emit.widen([emit.shared_memory(tile_smem).load(index)])
            kept = emit.select(_bit(mask >> position), entry, emit.f32(0.0))
            return emit.select(has_too_many, emit.f32(float("nan")), kept)

        pairs.append(PackedPair(packed_24.pack(survivor(nibble & 3), survivor(nibble >> 2), element), nibble))
    return pairs


def _bit(number: Number) -> Number:
    """Returns the lowest bit, as conditions are."""
    return Number(arith.trunci(ir.IntegerType.get_signless(1), number))
