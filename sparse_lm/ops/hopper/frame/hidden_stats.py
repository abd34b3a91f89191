"""Statistics that selections gather of the hidden layer while they pass over it: non-zeros and energies.

Numerics: energies are summed in float32, by warp, then by XLA: in the same order in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math

from sparse_lm.ops.formats import HiddenStats
from sparse_lm.ops.hopper.frame import emit, packed_24
from sparse_lm.ops.hopper.frame.emit import WARP_SIZE, WARPGROUP_SIZE, Number

_STATS = len(HiddenStats._fields)


def stats_type(blocks: int, warpgroups: int = 1) -> jax.ShapeDtypeStruct:
    """Returns the type of the array that `store_stats` fills."""
    return jax.ShapeDtypeStruct((blocks, warpgroups * WARPGROUP_SIZE // WARP_SIZE, _STATS), jnp.float32)


class Seen(NamedTuple):
    """A thread's part of `HiddenStats`."""

    nonzeros: Number  # an integer
    energy: Number
    kept_energy: Number

    @classmethod
    def nothing(cls) -> Seen:
        """Returns zeros, to add to."""
        return cls(emit.i32(0), emit.f32(0.0), emit.f32(0.0))

    def add(self, y: Sequence[Number], kept: Sequence[Number], element: ir.Type) -> Seen:
        """Adds words of Y, and of the kept part of it."""
        nonzeros = self.nonzeros + count_nonzeros(y)
        return Seen(nonzeros, _add_squares(self.energy, y, element), _add_squares(self.kept_energy, kept, element))


def count_nonzeros(words: Sequence[Number]) -> Number:
    """Counts the halves of up to 16 words, none of them negative, that are not +0."""
    bits = emit.i32(0)
    for number, word in enumerate(words):
        carries = (word + 0x7FFF7FFF) & -0x7FFF8000  # 0x80008000
        bits = bits | (carries >> number)
    return Number(math.ctpop(bits))


def _add_squares(total: Number, words: Sequence[Number], element: ir.Type) -> Number:
    for word in words:
        total = packed_24.add_products(total, word, word, element)
    return total


def store_stats(stats: ir.Value, block: Number, seen: Seen) -> None:
    """Stores a block's sums, by warp, to stats [blocks, warps, 3], from what its threads have seen."""
    sums = Number(arith.uitofp(ir.F32Type.get(), seen.nonzeros)), seen.energy, seen.kept_energy
    warps = emit.shape_of(stats)[1]
    warp = emit.thread_index() // WARP_SIZE % warps
    first = (block * warps + warp).wide() * _STATS
    for number, total in enumerate(sums):
        index = first + number
        pointer = emit.global_memory(stats).at(index)
        for distance in (16, 8, 4, 2, 1):  # then every lane holds the sum: all write the same
            total = total + mgpu_utils.shfl_bfly(total, distance)
        llvm.store(total, pointer)
