"""A tile of 64 x 64 as the threads of a warpgroup share it.

Thread 32 w + 4 g + t holds rows 16 w + g and 16 w + g + 8, columns 16 t to 16 t + 15: eight groups of
four, whose values are 16 bytes a row and whose metadata is one word, so that every access to global
memory is a whole sector and no thread needs another's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from sparse_lm.ops.formats import TILE
from sparse_lm.ops.hopper.frame.emit import (
    WARP_SIZE,
    WARPGROUP_SIZE,
    global_pointer,
    i32,
    i64,
    i64_type,
    load_vectors,
    load_words,
    mul64,
    narrow,
    store_vectors,
    store_words,
    vector,
    vector_lanes,
)
from sparse_lm.ops.hopper.frame.packed_24 import PackedPair
from sparse_lm.ops.hopper.frame.two_of_four import Pair

THREAD_COLUMNS = 16  # columns of a row that a thread holds: four groups
HALVES = range(2)  # of a thread's rows
SHARED_STRIDE = TILE + 1  # of a tile's rows in shared memory, where they are read by columns: these keep off one bank


@dataclasses.dataclass(frozen=True)
class Thread:
    """A thread's place in a tile."""

    index: ir.Value  # in its warpgroup
    row: ir.Value  # the upper one
    column: ir.Value  # the first

    @classmethod
    def current(cls) -> Thread:
        """Returns the place of the thread that runs this."""
        index = arith.remui(mgpu_utils.thread_idx(), i32(WARPGROUP_SIZE))
        lane = arith.remui(index, i32(WARP_SIZE))
        warp_row = arith.muli(arith.divui(index, i32(WARP_SIZE)), i32(16))
        row = arith.addi(warp_row, arith.divui(lane, i32(4)))
        return cls(index, row, arith.muli(arith.remui(lane, i32(4)), i32(THREAD_COLUMNS)))


@dataclasses.dataclass(frozen=True)
class Tile:
    """A thread's part of the tile at (row, column), in tiles, of a matrix."""

    thread: Thread
    row: ir.Value
    column: ir.Value

    def start(self, half: int, width: int) -> ir.Value:
        """Computes the 64-bit offset of the thread's columns in its upper (0) or lower (1) row, of `width` columns."""
        row = arith.addi(arith.addi(arith.muli(self.row, i32(TILE)), self.thread.row), i32(8 * half))
        column = arith.addi(arith.muli(self.column, i32(TILE)), self.thread.column)
        return arith.addi(mul64(row, width), arith.extui(i64_type(), column))

    def load(self, x: ir.Value) -> list[list[ir.Value]]:
        """Loads both rows' columns of a matrix in global memory."""
        width = ir.MemRefType(x.type).shape[1]
        return [load_vectors(x, self.start(half, width), THREAD_COLUMNS) for half in HALVES]

    def store(self, x: ir.Value, rows: Sequence[Sequence[ir.Value]]) -> None:
        """Stores both rows' columns, rounded to the matrix's dtype."""
        ref = ir.MemRefType(x.type)
        for half, row in zip(HALVES, rows, strict=True):
            store_vectors(x, self.start(half, ref.shape[1]), narrow(row, ref.element_type))

    def load_words(self, x: ir.Value) -> list[list[ir.Value]]:
        """Loads both rows' columns of a matrix of 16-bit elements, eight words each."""
        width = ir.MemRefType(x.type).shape[1]
        return [load_words(x, self.start(half, width), THREAD_COLUMNS // 2) for half in HALVES]

    def load_packed(self, values: ir.Value) -> list[list[ir.Value]]:
        """Loads both rows' survivors, four words each, of a compressed matrix of 16-bit elements."""
        width = ir.MemRefType(values.type).shape[1]
        return [load_words(values, self._start_of_pairs(half, width), THREAD_COLUMNS // 4) for half in HALVES]

    def store_packed(self, values: ir.Value, rows: Sequence[Sequence[ir.Value]]) -> None:
        """Stores both rows' survivors, a word a group."""
        width = ir.MemRefType(values.type).shape[1]
        for half, words in zip(HALVES, rows, strict=True):
            store_words(values, self._start_of_pairs(half, width), words)

    def store_pairs(self, values: ir.Value, rows: Sequence[Sequence[Pair]]) -> None:
        """Stores both rows' survivors, rounded to the dtype of the values."""
        ref = ir.MemRefType(values.type)
        for half, pairs in zip(HALVES, rows, strict=True):
            kept = [value for pair in pairs for value in (pair.low, pair.high)]
            store_vectors(values, self._start_of_pairs(half, ref.shape[1]), narrow(kept, ref.element_type))

    def load_word(self, metadata: ir.Value) -> ir.Value:
        """Loads the thread's word of metadata, eight groups."""
        return llvm.load(ir.MemRefType(metadata.type).element_type, self._word(metadata))

    def store_word(self, metadata: ir.Value, rows: Sequence[Sequence[Pair | PackedPair]]) -> None:
        """Stores the metadata of both rows' groups."""
        word = i32(0)
        for half, pairs in zip(HALVES, rows, strict=True):
            for group, pair in enumerate(pairs):
                word = arith.ori(word, arith.shli(pair.nibble, i32(THREAD_COLUMNS * half + 4 * group)))
        llvm.store(word, self._word(metadata))

    def _start_of_pairs(self, half: int, width: int) -> ir.Value:
        return arith.shrui(self.start(half, 2 * width), i64(1))

    def _word(self, metadata: ir.Value) -> ir.Value:
        """Computes where the thread's word of metadata [rows / 64, columns / 64, 128] is."""
        ref = ir.MemRefType(metadata.type)
        tile = arith.addi(arith.muli(self.row, i32(ref.shape[1])), self.column)
        index = arith.addi(mul64(tile, WARPGROUP_SIZE), arith.extui(i64_type(), self.thread.index))
        return mgpu_utils.getelementptr(global_pointer(metadata), [index], ref.element_type)


def load_tile(x: ir.Value, tile: Tile) -> tuple[ir.Value, ir.Value, list[tuple[int, list[ir.Value]]]]:
    """Loads a tile's entries such that neighbouring threads read neighbouring 16 bytes, to be put into shared memory.

    Returns:
      Row and column in the tile, and pairs (first row, entries): entries follow one another from (row + first row,
      column) on.
    """
    ref = ir.MemRefType(x.type)
    lanes = vector_lanes(ref.element_type)
    threads_per_row = TILE // lanes
    row = arith.divui(tile.thread.index, i32(threads_per_row))
    column = arith.muli(arith.remui(tile.thread.index, i32(threads_per_row)), i32(lanes))
    x_row = arith.addi(arith.muli(tile.row, i32(TILE)), row)
    x_column = arith.addi(arith.muli(tile.column, i32(TILE)), column)
    loaded = []
    for first in range(0, TILE, WARPGROUP_SIZE // threads_per_row):
        start = arith.addi(mul64(arith.addi(x_row, i32(first)), ref.shape[1]), arith.extui(i64_type(), x_column))
        loaded.append((first, load_vectors(x, start, lanes)))
    return row, column, loaded


def nibbles(word: ir.Value) -> list[list[ir.Value]]:
    """Splits a word of metadata into the nibbles of both rows of a thread, four groups each."""
    return [
        [
            arith.andi(arith.shrui(word, i32(THREAD_COLUMNS * half + 4 * group)), i32(15))
            for group in range(THREAD_COLUMNS // 4)
        ]
        for half in HALVES
    ]


def groups(columns: Sequence[ir.Value]) -> list[list[ir.Value]]:
    """Splits a row's columns into groups of four."""
    return [list(columns[first : first + 4]) for first in range(0, len(columns), 4)]


def thread_columns_pointers(
    values: ir.Value, metadata: ir.Value, row: ir.Value, column: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Computes where survivors of 16 columns of a row, from `column` on, go: 16 bytes of values, half a metadata
    word."""
    width, element = ir.MemRefType(values.type).shape[1], ir.MemRefType(values.type).element_type
    start = arith.addi(mul64(row, width), arith.extui(i64_type(), arith.shrui(column, i32(1))))
    word_tile = arith.addi(
        arith.muli(arith.shrui(row, i32(6)), i32(ir.MemRefType(metadata.type).shape[1])), arith.shrui(column, i32(6))
    )
    warp, half, line = (arith.andi(arith.shrui(row, i32(shift)), i32(mask)) for shift, mask in ((4, 3), (3, 1), (0, 7)))
    lane = arith.addi(arith.muli(line, i32(4)), arith.andi(arith.shrui(column, i32(4)), i32(3)))
    first_word = mul64(word_tile, WARPGROUP_SIZE)
    thread = arith.addi(arith.muli(warp, i32(WARP_SIZE)), lane)
    word = arith.addi(first_word, arith.extui(i64_type(), thread))
    index = arith.addi(arith.muli(word, i64(2)), arith.extui(i64_type(), half))
    return (
        mgpu_utils.getelementptr(global_pointer(values), [start], element),
        mgpu_utils.getelementptr(global_pointer(metadata), [index], ir.IntegerType.get_signless(16)),
    )


def store_thread_columns(
    values: ir.Value, metadata: ir.Value, row: ir.Value, column: ir.Value, pairs: Sequence[PackedPair]
) -> None:
    """Stores the survivors of 16 columns of a row, from `column` on."""
    values_pointer, metadata_pointer = thread_columns_pointers(values, metadata, row, column)
    llvm.store(vector([pair.values for pair in pairs]), values_pointer, alignment=16)
    llvm.store(half_word(pairs), metadata_pointer)


def half_word(pairs: Sequence[PackedPair]) -> ir.Value:
    """Joins metadata of four groups to 16 bits."""
    bits = i32(0)
    for group, pair in enumerate(pairs):
        bits = arith.ori(bits, arith.shli(pair.nibble, i32(4 * group)))
    return arith.trunci(ir.IntegerType.get_signless(16), bits)
