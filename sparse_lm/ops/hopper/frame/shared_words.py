"""A tile of 64 x 64 words of 32 bits in shared memory, written by rows and read by columns.

A word of row r and column c lies at r * 97 + 8 (r // 32) + c + 8 (c // 32): neither the rows nor the columns that the
lanes of a warp hold share a bank.
"""

from __future__ import annotations

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from sparse_lm.ops.formats import TILE
from sparse_lm.ops.hopper.frame.emit import i32, i32_type
from sparse_lm.ops.hopper.frame.thread_tile import THREAD_COLUMNS, Thread

_SKEW = 8
_STRIDE = 97
COUNT = TILE * _STRIDE + _SKEW
"""Words that the tile takes."""


def pointer(words: ir.Value, row: ir.Value, column: ir.Value) -> ir.Value:
    """Computes where the word of an entry of the tile is."""

    def skewed(index: ir.Value) -> ir.Value:
        return arith.addi(index, arith.muli(arith.shrui(index, i32(5)), i32(_SKEW)))

    row_offset = arith.addi(arith.muli(row, i32(_STRIDE)), arith.muli(arith.shrui(row, i32(5)), i32(_SKEW)))
    index = arith.addi(row_offset, skewed(column))
    return mgpu_utils.getelementptr(mgpu_utils.memref_ptr(words), [index], i32_type())


def load_column(words: ir.Value, thread: Thread, column: ir.Value) -> list[ir.Value]:
    """Loads a thread's 16 rows of one column."""
    return [
        llvm.load(i32_type(), pointer(words, arith.addi(thread.column, i32(i)), column)) for i in range(THREAD_COLUMNS)
    ]
