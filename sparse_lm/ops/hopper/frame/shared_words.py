"""A tile of 64 x 64 words of 32 bits in shared memory, written by rows and read by columns.

A word of row r and column c lies at r * 97 + 8 (r // 32) + c + 8 (c // 32): neither the rows nor the columns that the
lanes of a warp hold share a bank.
"""

from __future__ import annotations

from jaxlib.mlir import ir

from sparse_lm.ops.formats import TILE
from sparse_lm.ops.hopper.frame.emit import Memory, Number, i32, i32_type, shared_memory
from sparse_lm.ops.hopper.frame.thread_tile import THREAD_COLUMNS, Thread

_SKEW = 8
_STRIDE = 97
COUNT = TILE * _STRIDE + _SKEW
"""Words that the tile takes."""


def words_from(words: ir.Value, row: Number, column: Number) -> Memory:
    """Returns the words that begin with an entry of the tile: those of a group of four columns are neighbours."""
    index = row * _STRIDE + (row >> 5) * _SKEW + (column + (column >> 5) * _SKEW)
    return Memory(shared_memory(words).at(index), i32_type())


def load_column(words: ir.Value, thread: Thread, column: Number) -> list[Number]:
    """Loads a thread's 16 rows of one column."""
    first = words_from(words, thread.column, column)  # its rows are within one half of the tile's
    return [first.load(i32(i * _STRIDE)) for i in range(THREAD_COLUMNS)]
