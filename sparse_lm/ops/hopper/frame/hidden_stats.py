"""Statistics that selections gather of the hidden layer while they pass over it: non-zeros and energies.

Numerics: energies are summed in float32, by warp, then by XLA: in the same order in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math

from sparse_lm.ops.formats import HiddenStats
from sparse_lm.ops.hopper.frame import packed_24
from sparse_lm.ops.hopper.frame.emit import WARP_SIZE, WARPGROUP_SIZE, f32, global_pointer, i32, i64, mul64, warp_sum

WARPS = WARPGROUP_SIZE // WARP_SIZE
STATS = len(HiddenStats._fields)


class Seen(NamedTuple):
    """A thread's part of `HiddenStats`."""

    nonzeros: ir.Value  # an integer
    energy: ir.Value
    kept_energy: ir.Value

    @classmethod
    def nothing(cls) -> Seen:
        """Returns zeros, to add to."""
        return cls(i32(0), f32(0.0), f32(0.0))

    def add(self, y: Sequence[ir.Value], kept: Sequence[ir.Value], element: ir.Type) -> Seen:
        """Adds words of Y, and of the kept part of it."""
        nonzeros, energy, kept_energy = self
        nonzeros = arith.addi(nonzeros, count_nonzeros(y))
        for word in y:
            energy = _add_squares(energy, packed_24.unpack(word, element))
        for word in kept:
            kept_energy = _add_squares(kept_energy, packed_24.unpack(word, element))
        return Seen(nonzeros, energy, kept_energy)

    def stats(self) -> HiddenStats:
        """Converts this thread's sums to float32."""
        return HiddenStats(arith.uitofp(ir.F32Type.get(), self.nonzeros), self.energy, self.kept_energy)


def count_nonzeros(words: Sequence[ir.Value]) -> ir.Value:
    """Counts the halves of up to 16 words, none of them negative, that are not +0."""
    bits = i32(0)
    for number, word in enumerate(words):
        carries = arith.andi(arith.addi(word, i32(0x7FFF7FFF)), i32(-0x7FFF8000))  # 0x80008000
        bits = arith.ori(bits, arith.shrui(carries, i32(number)))
    return math.ctpop(bits)


def _add_squares(total: ir.Value, values: Sequence[ir.Value]) -> ir.Value:
    for value in values:
        total = math.fma(value, value, total)
    return total


def store_stats(stats: ir.Value, block: ir.Value, sums: HiddenStats) -> None:
    """Stores a block's sums, by warp, to stats [blocks, warps, 3], from the sums of its threads."""
    warps = ir.MemRefType(stats.type).shape[1]
    warp = arith.remui(arith.divui(mgpu_utils.thread_idx(), i32(WARP_SIZE)), i32(warps))
    first = mul64(arith.addi(arith.muli(block, i32(warps)), warp), STATS)
    for number, total in enumerate(sums):
        # Every lane holds the sum: all write the same.
        index = arith.addi(first, i64(number))
        pointer = mgpu_utils.getelementptr(global_pointer(stats), [index], ir.F32Type.get())
        llvm.store(warp_sum(total), pointer)
