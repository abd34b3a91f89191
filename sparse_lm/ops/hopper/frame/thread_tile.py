"""A tile of 64 x 64 as the threads of a warpgroup share it, and kernels whose blocks take such a tile each.

Thread 32 w + 4 g + t holds rows 16 w + g and 16 w + g + 8, columns 16 t to 16 t + 15: eight groups of
four, whose values are 16 bytes a row and whose metadata is one word, so that every access to global
memory is a whole sector and no thread needs another's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from sparse_lm.ops.formats import TILE
from sparse_lm.ops.hopper.frame import emit
from sparse_lm.ops.hopper.frame.emit import COMPILER_PARAMS, SCALAR, WARP_SIZE, WARPGROUP_SIZE, Number
from sparse_lm.ops.hopper.frame.packed_24 import PackedPair

THREAD_COLUMNS = 16  # columns of a row that a thread holds: four groups
HALVES = range(2)  # of a thread's rows
_COLUMNS_TOGETHER = 64  # tiles side by side that blocks take one after the other, at most: as far as was measured
SHARED_STRIDE = TILE + 1  # of a tile's rows in shared memory, where they are read by columns: these keep off one bank


@dataclasses.dataclass(frozen=True)
class Thread:
    """A thread's place in a tile."""

    index: Number  # in its warpgroup
    row: Number  # the upper one
    column: Number  # the first

    @classmethod
    def current(cls) -> Thread:
        """Returns the place of the thread that runs this."""
        index = emit.thread_of_warpgroup()
        lane = index % WARP_SIZE
        row = index // WARP_SIZE * 16 + lane // 4
        return cls(index, row, lane % 4 * THREAD_COLUMNS)


@dataclasses.dataclass(frozen=True)
class Tile:
    """A thread's part of the tile at (row, column), in tiles, of a matrix."""

    thread: Thread
    row: Number
    column: Number

    def start(self, half: int, width: int) -> Number:
        """Computes the 64-bit offset of the thread's columns in its upper (0) or lower (1) row, of `width` columns."""
        row = self.row * TILE + self.thread.row + 8 * half
        column = self.column * TILE + self.thread.column
        return row.wide() * width + column.wide()

    def load(self, x: ir.Value) -> list[list[Number]]:
        """Loads both rows' columns of a matrix in global memory."""
        return [emit.load_vectors(x, self.start(half, emit.shape_of(x)[1]), THREAD_COLUMNS) for half in HALVES]

    def load_words(self, x: ir.Value) -> list[list[Number]]:
        """Loads both rows' columns of a matrix of 16-bit elements, eight words each."""
        return [emit.load_words(x, self.start(half, emit.shape_of(x)[1]), THREAD_COLUMNS // 2) for half in HALVES]

    def load_by_row(self, x: ir.Value) -> list[Number]:
        """Loads the numbers of both rows, of which x [rows, 1] has one each."""
        return [emit.global_memory(x).load((self.row * TILE + self.thread.row + 8 * half).wide()) for half in HALVES]

    def load_packed(self, values: ir.Value) -> list[list[Number]]:
        """Loads both rows' survivors, four words each, of a compressed matrix of 16-bit elements."""
        return [emit.load_words(values, self._start_of_pairs(half, values), THREAD_COLUMNS // 4) for half in HALVES]

    def store_packed(self, values: ir.Value, rows: Sequence[Sequence[Number]]) -> None:
        """Stores both rows' survivors, a word a group, of a compressed matrix of 16-bit elements."""
        for half, words in zip(HALVES, rows, strict=True):
            emit.store_words(values, self._start_of_pairs(half, values), words)

    def store_24(self, values: ir.Value, metadata: ir.Value, rows: Sequence[Sequence[PackedPair]]) -> None:
        """Stores both rows' survivors and their metadata."""
        self.store_packed(values, [[pair.values for pair in pairs] for pairs in rows])
        word = _joined([pair for pairs in rows for pair in pairs])
        index = self._index_of_word(metadata)
        emit.global_memory(metadata).store(index, word)

    def load_nibbles(self, metadata: ir.Value) -> list[list[Number]]:
        """Loads the metadata of both rows' groups, four each."""
        index = self._index_of_word(metadata)
        word = emit.global_memory(metadata).load(index)
        return [[(word >> (THREAD_COLUMNS * half + 4 * group)) & 15 for group in range(4)] for half in HALVES]

    def _start_of_pairs(self, half: int, values: ir.Value) -> Number:
        return self.start(half, 2 * emit.shape_of(values)[1]) >> 1

    def _index_of_word(self, metadata: ir.Value) -> Number:
        """Computes where the thread's word of metadata [rows / 64, columns / 64, 128] is."""
        tile = self.row * emit.shape_of(metadata)[1] + self.column
        return tile.wide() * WARPGROUP_SIZE + self.thread.index.wide()


def run_by_tile(
    body: Callable[..., None],
    operands: Sequence[Array],
    out_type: Sequence[jax.ShapeDtypeStruct],
    tiles: tuple[int, int],
    *,
    name: str,
    scratch: Sequence[Any] = (),
) -> Sequence[Array]:
    """Runs a kernel whose blocks are one warpgroup and take a tile of 64 x 64 each.

    Blocks that run at the same time take tiles side by side, where their number is no odd one: memory reads and writes
    these faster than tiles below one another: presumably as neighbouring bytes of rows are in one page of it.

    Args:
      body: emits what a thread does, from its part of the tile, and references to operands, outputs and scratch.
      tiles: how many there are along rows and along columns.
    """

    together = math.gcd(tiles[1], _COLUMNS_TOGETHER)

    def kernel(*refs):
        @plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR, *(plgpu.RefType(),) * len(refs)))
        def inline(_, group, tile, *refs):
            row, column = emit.scalar(tile) // together, emit.scalar(group) * together + emit.scalar(tile) % together
            body(Tile(Thread.current(), row, column), *refs)

        inline(lax.axis_index("group"), lax.axis_index("tile"), *refs)

    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(tiles[1] // together, tiles[0] * together),  # the last may have more than 65,535 blocks
        grid_names=("group", "tile"),
        scratch_types=scratch,
        compiler_params=COMPILER_PARAMS,
        kernel_name=name,
    )(*operands)


def copy_tile(x: ir.Value, tile: Tile, shared: ir.Value) -> None:
    """Copies a tile to shared memory, rows `SHARED_STRIDE` apart. Neighbouring threads read neighbouring 16 bytes."""
    lanes = emit.vector_lanes(emit.element_of(x))
    threads_per_row = TILE // lanes
    row = tile.thread.index // threads_per_row
    column = tile.thread.index % threads_per_row * lanes
    x_row, x_column = tile.row * TILE + row, tile.column * TILE + column
    loaded = []
    for first in range(0, TILE, WARPGROUP_SIZE // threads_per_row):
        start = (x_row + first).wide() * emit.shape_of(x)[1] + x_column.wide()
        loaded.append((first, emit.load_vectors(x, start, lanes)))
    memory = emit.shared_memory(shared)
    for first, entries in loaded:
        start = (row + first) * SHARED_STRIDE + column
        for i, entry in enumerate(entries):
            memory.store(start + i, entry)
    mgpu_utils.warpgroup_barrier()


def store_thread_columns(
    values: ir.Value,
    metadata: ir.Value,
    row: Number,
    column: Number,
    pairs: Sequence[PackedPair],
    condition: Number | None = None,
) -> None:
    """Stores survivors of 16 columns of a row, from `column` on, and half a word of metadata, if `condition` holds."""
    start = row.wide() * emit.shape_of(values)[1] + (column >> 1).wide()
    word_tile = (row >> 6) * emit.shape_of(metadata)[1] + (column >> 6)
    warp, half, line = ((row >> shift) & mask for shift, mask in ((4, 3), (3, 1), (0, 7)))
    lane = line * 4 + ((column >> 4) & 3)
    first_word = word_tile.wide() * WARPGROUP_SIZE
    word = first_word + (warp * WARP_SIZE + lane).wide()
    index = word * 2 + half.wide()
    i16 = ir.IntegerType.get_signless(16)
    values_pointer, metadata_pointer = emit.global_memory(values).at(start), emit.global_memory(metadata, i16).at(index)
    words = [pair.values for pair in pairs]
    if condition is None:
        emit.store_vector(values_pointer, words)
        llvm.store(arith.trunci(i16, _joined(pairs)), metadata_pointer)
    else:
        emit.store_if(condition, values_pointer, words)
        emit.store_if(condition, metadata_pointer, [arith.trunci(i16, _joined(pairs))])


def _joined(pairs: Sequence[PackedPair]) -> Number:
    """Joins metadata of up to eight groups to a word."""
    word = emit.i32(0)
    for group, pair in enumerate(pairs):
        word = word | (pair.nibble << 4 * group)
    return word
