"""Scattered rows of a 2:4 matrix in global memory to the tiles that `wgmma.sp` reads, with `cp.async`.

A row is copied 128 columns at a time: 128 bytes of values, which fill two stages of 64 columns, and for
each stage the 16 bytes of metadata that hold the row's bits. These hold row r of every 16 and, in
the other halves of the words, row r + 8; where a word's lane lies in the instruction's metadata, two
*gathered* rows share a word. So the consumer puts its words together from halves of two rows' words.
What a thread copies from and to changes by a constant from step to step, so it is computed once a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from sparse_lm.ops.hopper.emit import (
    SCALAR,
    WARPGROUP_SIZE,
    global_pointer,
    i32,
    i32_type,
    i64,
    i64_type,
    ptx,
    times,
    true,
)
from sparse_lm.ops.hopper.gather import load_number, per_thread, start_copy, warp_and_lane
from sparse_lm.ops.hopper.wgmma_sp import KEPT, ROWS, VALUES_TRANSFORMS, splat

STAGES = 2  # of the ring that one gather fills

WORDS = 4  # of metadata, that hold 64 columns of a row

_CHUNK = 8  # elements of 16 bytes, which a thread copies at a time
_CHUNKS = KEPT // _CHUNK  # of a row's values, in a stage
_TILE_CHUNKS = 32  # 16 bytes each, of the metadata of 64 x 64


def load_offsets(columns: Any, metadata: Any, block: Array, first: Array, rows: int) -> tuple[Array, Array]:
    """Where this thread's copies of rows `columns[block, first : first + rows]` of a 2:4 matrix start.

    Args:
      columns: global memory int32 [B, Kc]. What lies past Kc counts as a row that does not exist.
      metadata: global memory, the matrix' metadata.
      block: row of `columns`.
      first: of the rows.
      rows: a multiple of 64.

    Returns:
      Offsets into values and metadata, in units of 16 bytes; of values that do not exist, -1.
    """
    width = columns.shape[1]
    row_tiles, k_tiles, _ = metadata.shape
    per_value = rows // 16
    per_metadata = rows * STAGES // WARPGROUP_SIZE

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=(_offsets_type(per_value), _offsets_type(per_metadata))
    )
    def emit(_, columns, block, first):
        block, first = block.registers.item(), first.registers.item()
        row, stage, chunk = _value_position()
        chunk = arith.addi(times(stage, _CHUNKS), chunk)
        values = []
        for i in range(per_value):
            number = load_number(columns, block, arith.addi(first, arith.addi(row, i32(16 * i))), width)
            exists = arith.cmpi(arith.CmpIPredicate.ult, number, i32(row_tiles * ROWS))
            offset = arith.addi(times(number, k_tiles * _CHUNKS), chunk)
            values.append(arith.select(exists, offset, i32(-1)))
        row, stage = _metadata_position()
        words = []
        for i in range(per_metadata):
            number = load_number(columns, block, arith.addi(first, arith.addi(row, i32(64 * i))), width)
            number = arith.minui(number, i32(row_tiles * ROWS - 1))
            tile, in_tile = arith.divui(number, i32(ROWS)), arith.remui(number, i32(ROWS))
            warp, g = arith.divui(in_tile, i32(16)), arith.remui(in_tile, i32(8))
            k_tile = arith.addi(times(tile, k_tiles), stage)
            words.append(arith.addi(times(k_tile, _TILE_CHUNKS), arith.addi(times(warp, 8), g)))
        return per_thread(values), per_thread(words)

    return emit(columns, block, first)


def start_gather(
    values: Any, metadata: Any, stages: tuple[tuple[Any, Any], ...], offsets: tuple[Array, Array], first_k: Array
) -> None:
    """Starts copying 128 columns, two steps along k, of the rows that `offsets` stand for.

    Args:
      values: global memory [F, D / 2] of 16-bit elements.
      metadata: global memory [F / 64, D / 64, 128] int32.
      stages: of the ring, (values, metadata) each: shared memory [rows, 32] with `VALUES_TRANSFORMS` and
        [rows, 4] int32.
      offsets: of `load_offsets`.
      first_k: the first step, an even number. Values of one past the last become zeros.
    """
    rows = stages[0][0].shape[0]
    k_tiles = metadata.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType(),
            ((plgpu.RefType(VALUES_TRANSFORMS), plgpu.RefType()),) * STAGES,
            (_offsets_layout(rows // 16), _offsets_layout(rows * STAGES // WARPGROUP_SIZE)),
            SCALAR,
        )
    )
    def emit(_, values, metadata, stages, offsets, first_k):
        value_offsets, metadata_offsets = offsets
        values_stages, metadata_stages = zip(*stages, strict=True)
        _start_values(values, values_stages, value_offsets, first_k.registers.item(), k_tiles)
        _start_metadata(metadata, metadata_stages, metadata_offsets, first_k.registers.item(), k_tiles)

    emit(values, metadata, stages, offsets, first_k)


def _start_values(values, stages, offsets: mgpu.FragmentedArray, first_k: ir.Value, k_tiles: int) -> None:
    row, stage, chunk = _value_position()
    exists = _exists(first_k, stage, k_tiles)
    source = _advance(global_pointer(values), times(first_k, _CHUNKS))
    # The tile is [rows / 8, 8, 32]; chunks of 8 elements are swizzled by half the row within 8.
    swizzled = arith.xori(chunk, arith.remui(arith.divui(row, i32(2)), i32(4)))
    target = _advance(_of_stage(stages, stage), arith.addi(times(row, _CHUNKS), swizzled))
    for i, offset in enumerate(_scalars(offsets)):
        row_exists = arith.cmpi(arith.CmpIPredicate.sge, offset, i32(0))
        start_copy(_advance(target, i32(16 * _CHUNKS * i)), _advance(source, offset), arith.andi(exists, row_exists))


def _start_metadata(metadata, stages, offsets: mgpu.FragmentedArray, first_k: ir.Value, k_tiles: int) -> None:
    row, stage = _metadata_position()
    # Past the last column, the metadata of column 0: the instruction wants valid positions.
    exists = _exists(first_k, stage, k_tiles)
    step_offset = arith.select(exists, times(first_k, _TILE_CHUNKS), times(stage, -_TILE_CHUNKS))
    source = _advance(global_pointer(metadata), step_offset)
    target = _advance(_of_stage(stages, stage), row)
    for i, offset in enumerate(_scalars(offsets)):
        start_copy(_advance(target, i32(64 * i)), _advance(source, offset), true())


def load_selectors(columns: Any, block: Array, first: Array, blocks: int) -> tuple[Array, ...]:
    """For each 64 rows from `columns[block, first]`, which halves of this lane's two words it wants (`load_words`)."""
    width = columns.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=_words_type(blocks))
    def emit(_, columns, block, first):
        block, first = block.registers.item(), first.registers.item()
        warp, lane = warp_and_lane()
        row = arith.addi(first, arith.addi(times(warp, 16), arith.divui(lane, i32(4))))
        selectors = []
        for i in range(blocks):
            # Of the bytes of two words, 0 to 3 and 4 to 7: the lower or upper two of each, by which of 16 rows it was.
            selector = i32(0x5410)
            for half, step in (0, 0x0022), (8, 0x2200):
                number = load_number(columns, block, arith.addi(row, i32(64 * i + half)), width)
                upper = arith.remui(arith.divui(number, i32(8)), i32(2))
                selector = arith.addi(selector, times(upper, step))
            selectors.append(splat(selector))
        return tuple(selectors)

    return emit(columns, block, first)


def load_words(metadata: Any, selectors: tuple[Array, ...]) -> tuple[Array, ...]:
    """This lane's metadata words of a step, as `wgmma_sp.step` wants them.

    Args:
      metadata: shared memory [64 * blocks, 4] int32, as `start_gather` fills it.
      selectors: of `load_selectors`.
    """
    blocks = len(selectors)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), (SCALAR,) * blocks), return_type=_words_type(blocks))
    def emit(_, metadata, selectors):
        warp, lane = warp_and_lane()
        first = arith.addi(times(warp, 16 * WORDS), lane)  # row 16 * warp + lane // 4, word lane % 4
        words = []
        for i, selector in enumerate(selectors):
            addresses = [
                mgpu_utils.getelementptr(
                    mgpu_utils.memref_ptr(metadata), [arith.addi(first, i32((64 * i + half) * WORDS))], i32_type()
                )
                for half in (0, 8)
            ]
            code = (
                "{ .reg .b32 a, b; ld.volatile.shared.u32 a, [$1]; ld.volatile.shared.u32 b, [$2];"
                " prmt.b32 $0, a, b, $3; }"
            )
            words.append(splat(ptx(code, "=r,l,l,r", [*addresses, selector.registers.item()], i32_type())))
        return tuple(words)

    return emit(metadata, selectors)


def _value_position() -> tuple[ir.Value, ir.Value, ir.Value]:
    """(row of 16, stage, chunk) that this thread copies: a warp takes four rows, whose writes meet no bank twice."""
    warp, lane = warp_and_lane()

    def bits(first, count):
        shifted = arith.divui(lane, i32(1 << first))
        return arith.remui(shifted, i32(1 << count))

    row = arith.addi(times(warp, 4), arith.addi(bits(2, 1), times(bits(4, 1), 2)))
    return row, bits(3, 1), bits(0, 2)


def _metadata_position() -> tuple[ir.Value, ir.Value]:
    """(row of 64, stage) whose metadata this thread copies."""
    warp, lane = warp_and_lane()
    row = arith.addi(times(warp, 16), arith.remui(lane, i32(16)))
    return row, arith.divui(lane, i32(16))


def _exists(first_k: ir.Value, stage: ir.Value, k_tiles: int) -> ir.Value:
    """Whether the stage's step is not past the last."""
    if k_tiles % STAGES == 0:
        return true()
    return arith.cmpi(arith.CmpIPredicate.ult, arith.addi(first_k, stage), i32(k_tiles))


def _scalars(offsets: mgpu.FragmentedArray) -> list[ir.Value]:
    return [llvm.extractelement(register, i32(0)) for register in offsets.registers.flat]


def _of_stage(stages: Sequence[ir.Value], stage: ir.Value) -> ir.Value:
    """Address of the first or second stage's memory."""
    first = arith.cmpi(arith.CmpIPredicate.eq, stage, i32(0))
    return arith.select(first, *map(mgpu_utils.memref_ptr, stages))


def _advance(pointer: ir.Value, offset: ir.Value) -> ir.Value:
    """`offset` counts 16 bytes."""
    byte_offset = arith.muli(arith.extsi(i64_type(), offset), i64(16))
    return mgpu_utils.getelementptr(pointer, [byte_offset], ir.IntegerType.get_signless(8))


def _offsets_layout(count: int) -> Any:
    return plgpu.Layout.WG_STRIDED((WARPGROUP_SIZE * count,), 1)


def _offsets_type(count: int) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct((WARPGROUP_SIZE * count,), jnp.int32, layout=_offsets_layout(count))


def _words_type(blocks: int) -> tuple[plgpu.ShapeDtypeStruct, ...]:
    return (plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR),) * blocks
