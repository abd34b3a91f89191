"""Dense matrix to the 2:4 forms of itself and of its transpose, under one mask of 4 x 4 tiles, from one read.

A block is one warpgroup and takes 64 x 64 entries, which it keeps in shared memory. Each thread finds, or
reads, the masks of two tiles of 4 x 4, 16 bits each; then every thread takes the survivors of its rows
(thread_tile.py), and of its columns, from shared memory.

Numerics: sums of magnitudes in float32; where two patterns keep nearly the same, the choice may differ
from the reference's. All else is the reference bit for bit.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math

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
from sparse_lm.ops.kernel_dtypes import check_selection_dtypes
from sparse_lm.ops.select import LARGEST
from sparse_lm.ops.transposable import TRANSPOSABLE_PATTERNS

_ACROSS = TILE // 4  # tiles of 4 x 4
_PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))


def sparsify_24_tiles(x: Array, mask: Array | None, *, dtype: DTypeLike) -> tuple[Sparse24, Sparse24]:
    """See `sparse_lm.ops.sparsify_24_tiles`.

    Raises:
      NotImplementedError: the dtypes.
    """
    dtype = jnp.dtype(dtype)
    check_selection_dtypes(x.dtype, dtype)
    operands = [pad_to_tiles(x)]
    if mask is not None:
        operands.append(pad_to_tiles(mask))
    values, metadata, values_t, metadata_t = _call(operands, x.shape, dtype)
    return Sparse24(values, metadata, x.shape), Sparse24(values_t, metadata_t, x.shape[::-1])


def _call(operands: list[Array], shape: tuple[int, int], dtype: jnp.dtype) -> tuple[Array, ...]:
    """Computes values and metadata of both forms; the operands are x, of `shape` before padding, and perhaps the
    mask."""
    x = operands[0]
    row_tiles, column_tiles = (size // TILE for size in x.shape)

    def form(rows, columns):
        return (
            jax.ShapeDtypeStruct((rows * TILE, columns * TILE // 2), dtype),
            jax.ShapeDtypeStruct((rows, columns, WARPGROUP_SIZE), jnp.int32),
        )

    refs = len(operands) + 4 + 2

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * refs, SCALAR, SCALAR))
    def sparsify_tile(_, x_gmem, *rest):
        *mask_gmem, values, metadata, values_t, metadata_t, tile_smem, masks_smem, row, column = rest
        tile = Tile(Thread.current(), row.registers.item(), column.registers.item())
        _store_tile(load_tile(x_gmem, tile), tile_smem)
        mgpu_utils.warpgroup_barrier()
        for number in range(_ACROSS * _ACROSS // WARPGROUP_SIZE):
            place = arith.addi(tile.thread.index, i32(WARPGROUP_SIZE * number))
            if mask_gmem:
                mask = _load_mask(*mask_gmem, tile, place)
            else:
                mask = arith.andi(_best_mask(tile_smem, place), _inside(tile, place, shape))
            llvm.store(mask, _mask_pointer(masks_smem, place))
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
    )(*operands)


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


def _inside(tile: Tile, place: ir.Value, shape: tuple[int, int]) -> ir.Value:
    """Computes the mask of a tile of 4 x 4 that keeps what lies in the matrix and drops its padding."""
    left = []
    for first_tile, first, size in zip((tile.row, tile.column), _origin(place), shape, strict=True):
        room = arith.subi(i32(size), arith.addi(arith.muli(first_tile, i32(TILE)), first))
        left.append(arith.minsi(arith.maxsi(room, i32(0)), i32(4)))
    rows = arith.subi(arith.shli(i32(1), arith.shli(left[0], i32(2))), i32(1))
    columns = arith.muli(arith.subi(arith.shli(i32(1), left[1]), i32(1)), i32(0x1111))
    return arith.andi(rows, columns)


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


def _best_mask(tile_smem: ir.Value, place: ir.Value) -> ir.Value:
    """Finds the pattern that keeps the largest sum of magnitudes in a tile of 4 x 4; of equal sums the lowest."""
    row, column = _origin(place)
    of_pairs = []
    for i in range(4):
        entries = [_load_entry(tile_smem, arith.addi(row, i32(i)), arith.addi(column, i32(j))) for j in range(4)]
        magnitudes = [_finite_magnitude(entry) for entry in entries]
        of_pairs.append({pair: arith.addf(*(magnitudes[j] for j in pair)) for pair in _PAIRS})
    upper, lower = (
        {(a, b): arith.addf(of_pairs[i][a], of_pairs[i + 1][b]) for a in _PAIRS for b in _PAIRS} for i in (0, 2)
    )
    most, best = None, None
    for pattern in TRANSPOSABLE_PATTERNS:
        a, b, c, d = (tuple(np.flatnonzero(kept).tolist()) for kept in pattern)
        bits = i32(sum(1 << 4 * i + j for i, j in np.argwhere(pattern).tolist()))
        kept = arith.addf(upper[a, b], lower[c, d])
        if most is None:
            most, best = kept, bits
            continue
        best = arith.select(arith.cmpf(arith.CmpFPredicate.OGT, kept, most), bits, best)
        most = arith.maxnumf(kept, most)
    return best


def _finite_magnitude(x: ir.Value) -> ir.Value:
    """Computes `select.finite_magnitude` of one float32."""
    magnitude = math.absf(x)
    return arith.select(arith.cmpf(arith.CmpFPredicate.OLT, magnitude, f32(LARGEST)), magnitude, f32(LARGEST))


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
