"""Gathers rows of a 2:4 matrix in global memory into the tiles that `wgmma.sp` reads, with `cp.async`.

A row is copied 128 columns at a time: 128 bytes of values, which fill two stages of 64 columns, and the
16 bytes of metadata of both, which the first stage holds. In the format a word has two rows, and the next
64 columns of a row lie elsewhere: twice the copies would bring as much of other rows as of those listed. So
the metadata is first arranged by rows (`metadata_by_rows`). In the instruction's metadata two *gathered*
rows share a word, which the consumer puts together from halves of theirs (`load_words`).
What a thread copies from and to changes by a constant from step to step, so it is computed once a tile.
"""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from sparse_lm.ops.formats import EMPTY_WORD
from sparse_lm.ops.hopper.frame import emit, gather
from sparse_lm.ops.hopper.frame.emit import SCALAR, WARPGROUP_SIZE, Memory, Number
from sparse_lm.ops.hopper.frame.wgmma_sp import KEPT, ROWS, VALUES_TRANSFORMS, Words, load_word, splat, words_type

STAGES = 2  # of the ring that one gather fills
WORDS = 4  # of metadata, that hold a row's columns of one gather

_CHUNKS = KEPT // gather.CHUNK  # of a row's values, in a stage


def metadata_by_rows(metadata: Array) -> Array:
    """Brings a 2:4 matrix' metadata, int32 [F / 64, D / 64, 128], to int32 [F, 4 * ceil(D / 128)], row by row.

    Word 4 p + t of a row has the groups of columns 128 p + 16 t to 128 p + 16 t + 15 in its lower half and
    those of the columns 64 further on in its upper half; where these lie past D, they are empty.
    """
    tiles, steps, _ = metadata.shape
    gathers = -(-steps // STAGES)
    padding = (0, 0), (0, gathers * STAGES - steps), (0, 0)
    words = jnp.pad(lax.bitcast_convert_type(metadata, jnp.uint32), padding, constant_values=EMPTY_WORD)
    first, second = jnp.unstack(words.reshape(tiles, gathers, STAGES, 4, 8, WORDS), axis=2)
    row = first & 0xFFFF | second << 16
    row_plus_8 = first >> 16 | second >> 16 << 16
    rows = jnp.stack([row, row_plus_8], axis=3)  # tile, gather, warp, half of the word, g, word
    rows = rows.transpose(0, 2, 3, 4, 1, 5).reshape(tiles * ROWS, gathers * WORDS)
    return lax.bitcast_convert_type(rows, jnp.int32)


def load_offsets(
    columns: Any, values: Any, metadata: Any, block: Array, first: Array, rows: int
) -> tuple[Array, Array]:
    """Computes where this thread's copies of rows `columns[block, first : first + rows]` of a 2:4 matrix start.

    What lies past the end of `columns`, int32 [B, Kc], counts as a row that does not exist. `metadata` is that of
    `metadata_by_rows`, and `rows` a multiple of 128.

    Returns:
      Offsets into values and metadata, in units of 16 bytes; of values that do not exist, -1.
    """
    height, value_chunks, gathers = values.shape[0], values.shape[1] // gather.CHUNK, metadata.shape[1] // WORDS
    per_value, per_metadata = rows // 16, rows // WARPGROUP_SIZE

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR),
        return_type=(gather.per_thread_type(per_value), gather.per_thread_type(per_metadata)),
    )
    def inline(_, columns, block, first):
        block, first = emit.scalar(block), emit.scalar(first)
        row, stage, chunk = _value_position()
        chunk = stage * _CHUNKS + chunk
        value_offsets = []
        for i in range(per_value):
            number = gather.load_number(columns, block, first + (row + 16 * i))
            exists = number.compare("ult", height)
            offset = number * value_chunks + chunk
            value_offsets.append(emit.select(exists, offset, emit.i32(-1)))
        metadata_offsets = []
        for i in range(per_metadata):
            row = emit.thread_of_warpgroup() + WARPGROUP_SIZE * i
            number = gather.load_number(columns, block, first + row)
            # The instruction wants valid positions of rows that do not exist, too.
            metadata_offsets.append(emit.minimum(number, emit.i32(height - 1)) * gathers)
        return gather.per_thread(value_offsets), gather.per_thread(metadata_offsets)

    return inline(columns, block, first)


def start_gather(
    values: Any,
    metadata: Any,
    values_stages: tuple[Any, Any],
    metadata_stage: Any,
    offsets: tuple[Array, Array],
    number: Array,
) -> None:
    """Starts copying 128 columns, two steps along k, of the rows that `offsets` stand for.

    Args:
      values: of 16-bit elements.
      metadata: that of `metadata_by_rows`.
      values_stages: of the ring: [rows, 32] each, with `VALUES_TRANSFORMS`.
      metadata_stage: of the first of the two: int32 [rows, 4].
      offsets: of `load_offsets`.
      number: which 128 columns. Values of a step past the last become zeros.
    """
    rows = metadata_stage.shape[0]
    k_tiles = values.shape[1] // KEPT
    types = plgpu.RefType(), plgpu.RefType(), (plgpu.RefType(VALUES_TRANSFORMS),) * STAGES, plgpu.RefType()
    offsets_types = tuple(gather.per_thread_type(count).layout for count in (rows // 16, rows // WARPGROUP_SIZE))

    @plgpu.inline_mgpu(arg_types=(*types, offsets_types, SCALAR))
    def inline(_, values, metadata, values_stages, metadata_stage, offsets, number):
        value_offsets, metadata_offsets = offsets
        number = emit.scalar(number)
        first_k = number * STAGES
        row, stage, chunk = _value_position()
        exists = emit.true() if k_tiles % STAGES == 0 else (first_k + stage).compare("ult", k_tiles)
        source = _advance(emit.global_memory(values).start, first_k * _CHUNKS)
        # The tile is [rows / 8, 8, 32]; chunks of 8 elements are swizzled by half the row within 8.
        swizzled = chunk ^ (row // 2 % 4)
        stage_start = emit.select(stage.compare("eq", 0), *(emit.shared_memory(ref).start for ref in values_stages))
        target = _advance(stage_start, row * _CHUNKS + swizzled)
        for i, offset in enumerate(gather.own_numbers(value_offsets)):
            row_exists = offset.compare("sge", 0)
            gather.start_copy(
                _advance(target, emit.i32(16 * _CHUNKS * i)), _advance(source, offset), exists & row_exists
            )
        source = _advance(emit.global_memory(metadata).start, number)
        target = _advance(emit.shared_memory(metadata_stage).start, emit.thread_of_warpgroup())
        for i, offset in enumerate(gather.own_numbers(metadata_offsets)):
            gather.start_copy(_advance(target, emit.i32(WARPGROUP_SIZE * i)), _advance(source, offset), emit.true())

    inline(values, metadata, values_stages, metadata_stage, offsets, number)


def load_words(metadata: Any, read_ahead: Words | None) -> tuple[Words, Words | None]:
    """Loads this lane's metadata words of a step, as `persistent.accumulate` calls it.

    Shared memory, int32 [64 * blocks, 4] as `start_gather` fills it, is read once for both steps of a gather, at the
    first. The second's words are nevertheless put together at the second only: words made while those of the two steps
    before are still read would need a third set of registers, and two take turns (wgmma_sp.py).
    """
    if read_ahead is None:
        rows = _load_rows(metadata)
        return _join_halves(rows, emit.LOW_HALVES), rows
    return _join_halves(read_ahead, emit.HIGH_HALVES), None


def _load_rows(metadata: Any) -> Words:
    """Loads, of each 64 rows, this lane's words of the two rows that share one in the instruction's metadata."""
    blocks = metadata.shape[0] // ROWS

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=words_type(2 * blocks))
    def inline(_, metadata):
        warp, lane = emit.warp_and_lane()
        first = warp * (16 * WORDS) + lane  # row 16 * warp + lane // 4, word lane % 4
        rows = [ROWS * block + half for block in range(blocks) for half in (0, 8)]
        return tuple(splat(load_word(metadata, first + row * WORDS)) for row in rows)

    return inline(metadata)


def _join_halves(rows: Words, selector: int) -> Words:
    """Joins every two words to one, of the halves that `selector` takes."""

    @plgpu.inline_mgpu(arg_types=((SCALAR,) * len(rows),), return_type=words_type(len(rows) // 2))
    def inline(_, rows):
        words = list(map(emit.scalar, rows))
        code = f"prmt.b32 $0, $1, $2, {selector:#x};"
        pairs = zip(words[::2], words[1::2], strict=True)
        return tuple(splat(emit.ptx(code, "=r,r,r", pair, emit.i32_type())) for pair in pairs)

    return inline(rows)


def _value_position() -> tuple[Number, Number, Number]:
    """Returns (row of 16, stage, chunk) that this thread copies: a warp writes four rows, and no bank twice."""
    warp, lane = emit.warp_and_lane()

    def bits(first, count):
        return lane // (1 << first) % (1 << count)

    row = warp * 4 + (bits(2, 1) + bits(4, 1) * 2)
    return row, bits(3, 1), bits(0, 2)


def _advance(pointer: ir.Value, offset: Number) -> ir.Value:
    """Advances a pointer by `offset`, which counts 16 bytes."""
    byte_offset = Number(arith.extsi(emit.i64_type(), offset)) * 16
    return Memory(pointer, ir.IntegerType.get_signless(8)).at(byte_offset)
