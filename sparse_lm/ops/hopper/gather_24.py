"""Scattered rows of a 2:4 matrix in global memory to the tiles that `wgmma.sp` reads, with `cp.async`.

A row is copied 128 columns at a time: 128 bytes of values, which fill two stages of 64 columns, and for
each stage the 16 bytes of metadata that hold the row's bits. These hold row r of every 16 and, in
the other halves of the words, row r + 8; where a word's lane lies in the instruction's metadata, two
*gathered* rows share a word. So the consumer puts its words together from halves of two rows' words.
What a thread copies from and to changes by a constant from step to step, so it is computed once a tile.
"""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from sparse_lm.ops.hopper.gather import global_pointer, load_number, per_thread, start_copy, times, warp_and_lane
from sparse_lm.ops.hopper.wgmma_sp import KEPT, ROWS, SCALAR, VALUES_TRANSFORMS, splat

STAGES = 2  # of the ring that one gather fills

WORDS = 4  # of metadata, that hold 64 columns of a row

_THREADS = 128
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
    per_metadata = rows * STAGES // _THREADS

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=(_offsets_type(per_value), _offsets_type(per_metadata))
    )
    def emit(_, columns, block, first):
        i32 = ir.IntegerType.get_signless(32)
        c = mgpu_utils.c
        block, first = block.registers.item(), first.registers.item()
        row, stage, chunk = _value_position()
        chunk = arith.addi(times(stage, _CHUNKS), chunk)
        values = []
        for i in range(per_value):
            number = load_number(columns, block, arith.addi(first, arith.addi(row, c(16 * i, i32))), width)
            exists = arith.cmpi(arith.CmpIPredicate.ult, number, c(row_tiles * ROWS, i32))
            offset = arith.addi(times(number, k_tiles * _CHUNKS), chunk)
            values.append(arith.select(exists, offset, c(-1, i32)))
        row, stage = _metadata_position()
        words = []
        for i in range(per_metadata):
            number = load_number(columns, block, arith.addi(first, arith.addi(row, c(64 * i, i32))), width)
            number = arith.minui(number, c(row_tiles * ROWS - 1, i32))
            tile, in_tile = (arith.divui(number, c(ROWS, i32)), arith.remui(number, c(ROWS, i32)))
            warp, g = arith.divui(in_tile, c(16, i32)), arith.remui(in_tile, c(8, i32))
            k_tile = arith.addi(times(tile, k_tiles), stage)
            words.append(arith.addi(times(k_tile, _TILE_CHUNKS), arith.addi(times(warp, 8), g)))
        return per_thread(values), per_thread(words)

    return emit(columns, block, first)


def start_gather(
    values: Any, metadata: Any, stages: tuple[tuple[Any, Any], ...], offsets: tuple[Array, Array], step: Array
) -> None:
    """Starts copying columns `128 * step :` of the rows that `offsets` stand for.

    Args:
      values: global memory [F, D / 2] of 16-bit elements.
      metadata: global memory [F / 64, D / 64, 128] int32.
      stages: of the ring, (values, metadata) each: shared memory [rows, 32] with `VALUES_TRANSFORMS` and
        [rows, 4] int32. Past the last column values become zeros.
      offsets: of `load_offsets`.
      step: which 128 columns.
    """
    rows = stages[0][0].shape[0]
    k_tiles = metadata.shape[1]
    ragged = bool(k_tiles % STAGES)

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType(),
            ((plgpu.RefType(VALUES_TRANSFORMS), plgpu.RefType()),) * STAGES,
            (_offsets_layout(rows // 16), _offsets_layout(rows * STAGES // _THREADS)),
            SCALAR,
        )
    )
    def emit(_, values, metadata, stages, offsets, step):
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        i1 = ir.IntegerType.get_signless(1)
        c = mgpu_utils.c
        step = step.registers.item()
        value_offsets, metadata_offsets = ([_scalar(r) for r in o.registers.flat] for o in offsets)

        def advance(pointer, offset):
            """`offset` counts 16 bytes."""
            return mgpu_utils.getelementptr(pointer, [arith.muli(arith.extsi(i64, offset), c(16, i64))], _byte())

        def pick(stage, of_stage):
            return arith.select(arith.cmpi(arith.CmpIPredicate.eq, stage, c(0, i32)), *of_stage)

        row, stage, chunk = _value_position()
        in_width = c(1, i1)
        if ragged:
            in_width = arith.cmpi(arith.CmpIPredicate.ult, arith.addi(times(step, STAGES), stage), c(k_tiles, i32))
        source = advance(global_pointer(values), times(step, STAGES * _CHUNKS))
        target = pick(stage, [mgpu_utils.memref_ptr(v) for v, _ in stages])
        # The tile is [rows / 8, 8, 32]; chunks of 8 elements are swizzled by half the row within 8.
        swizzled = arith.xori(chunk, arith.remui(arith.divui(row, c(2, i32)), c(4, i32)))
        target = advance(target, arith.addi(times(row, _CHUNKS), swizzled))
        for i, offset in enumerate(value_offsets):
            exists = arith.andi(in_width, arith.cmpi(arith.CmpIPredicate.sge, offset, c(0, i32)))
            start_copy(advance(target, c(16 * _CHUNKS * i, i32)), advance(source, offset), exists)

        row, stage = _metadata_position()
        step_offset = times(step, STAGES * _TILE_CHUNKS)
        if ragged:  # past the last column, that of column 0: the instruction wants valid positions
            past = arith.cmpi(arith.CmpIPredicate.uge, arith.addi(times(step, STAGES), stage), c(k_tiles, i32))
            step_offset = arith.select(past, times(stage, -_TILE_CHUNKS), step_offset)
        source = advance(global_pointer(metadata), step_offset)
        target = advance(pick(stage, [mgpu_utils.memref_ptr(m) for _, m in stages]), row)
        for i, offset in enumerate(metadata_offsets):
            start_copy(advance(target, c(64 * i, i32)), advance(source, offset), c(1, i1))

    emit(values, metadata, stages, offsets, step)


def load_selectors(columns: Any, block: Array, first: Array, blocks: int) -> tuple[Array, ...]:
    """For each 64 rows from `columns[block, first]`, which halves of this lane's two words it wants (`load_words`)."""
    width = columns.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=_words_type(blocks))
    def emit(_, columns, block, first):
        i32 = ir.IntegerType.get_signless(32)
        c = mgpu_utils.c
        block, first = block.registers.item(), first.registers.item()
        warp, lane = warp_and_lane()
        row = arith.addi(first, arith.addi(times(warp, 16), arith.divui(lane, c(4, i32))))
        selectors = []
        for i in range(blocks):
            # Of the bytes of two words, 0 to 3 and 4 to 7: the lower or upper two of each, by which of 16 rows it was.
            selector = c(0x5410, i32)
            for half, step in (0, 0x0022), (8, 0x2200):
                number = load_number(columns, block, arith.addi(row, c(64 * i + half, i32)), width)
                upper = arith.remui(arith.divui(number, c(8, i32)), c(2, i32))
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
        i32 = ir.IntegerType.get_signless(32)
        c = mgpu_utils.c
        warp, lane = warp_and_lane()
        first = arith.addi(times(warp, 16 * WORDS), lane)  # row 16 * warp + lane // 4, word lane % 4
        words = []
        for i, selector in enumerate(selectors):
            addresses = [
                mgpu_utils.getelementptr(
                    mgpu_utils.memref_ptr(metadata), [arith.addi(first, c((64 * i + half) * WORDS, i32))], i32
                )
                for half in (0, 8)
            ]
            ptx = (
                "{ .reg .b32 a, b; ld.volatile.shared.u32 a, [$1]; ld.volatile.shared.u32 b, [$2];"
                " prmt.b32 $0, a, b, $3; }"
            )
            operands = [*addresses, selector.registers.item()]
            words.append(splat(llvm.inline_asm(i32, operands, ptx, "=r,l,l,r", has_side_effects=True)))
        return tuple(words)

    return emit(metadata, selectors)


def _value_position() -> tuple[ir.Value, ir.Value, ir.Value]:
    """(row of 16, stage, chunk) that this thread copies: a warp takes four rows, whose writes meet no bank twice."""
    i32 = ir.IntegerType.get_signless(32)
    warp, lane = warp_and_lane()

    def bits(first, count):
        shifted = arith.divui(lane, mgpu_utils.c(1 << first, i32))
        return arith.remui(shifted, mgpu_utils.c(1 << count, i32))

    row = arith.addi(times(warp, 4), arith.addi(bits(2, 1), times(bits(4, 1), 2)))
    return row, bits(3, 1), bits(0, 2)


def _metadata_position() -> tuple[ir.Value, ir.Value]:
    """(row of 64, stage) whose metadata this thread copies."""
    i32 = ir.IntegerType.get_signless(32)
    warp, lane = warp_and_lane()
    row = arith.addi(times(warp, 16), arith.remui(lane, mgpu_utils.c(16, i32)))
    return row, arith.divui(lane, mgpu_utils.c(16, i32))


def _scalar(register: ir.Value) -> ir.Value:
    return llvm.extractelement(register, mgpu_utils.c(0, ir.IntegerType.get_signless(32)))


def _offsets_layout(count: int) -> Any:
    return plgpu.Layout.WG_STRIDED((_THREADS * count,), 1)


def _offsets_type(count: int) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct((_THREADS * count,), jnp.int32, layout=_offsets_layout(count))


def _words_type(blocks: int) -> tuple[plgpu.ShapeDtypeStruct, ...]:
    return (plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR),) * blocks


def _byte() -> ir.Type:
    return ir.IntegerType.get_signless(8)
