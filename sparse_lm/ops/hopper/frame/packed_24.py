"""Selects two of each four 16-bit floats, held in pairs in words of 32 bits, as they lie in memory.

Why: on Hopper integer instructions, comparisons and selections run at half rate, and those of float32 (two_of_four.py)
take longer than memory does for 16-bit matrices. Here each member gets a key,

    magnitude, 15 bits | zeros | 3 - position | sign      (the sign is left out of what cannot be negative)

Keys order as magnitudes do, of equal magnitudes the lower position's is the larger, and no two are equal: minima and
maxima give the two largest, which hold all that is stored of them. The rules are those of `sparse_lm.ops.select`,
if every NaN has the same magnitude, as those that conversions and products make have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from sparse_lm.ops.hopper.frame.emit import i32, i32_type, widen

_HIGH_HALVES = 0x7632  # selector of bytes: the high halves of two words
_LOW_HALVES = 0x5410


class PackedPair(NamedTuple):
    """The two survivors of a group of four."""

    values: ir.Value  # a word, the first in its low half
    nibble: ir.Value  # their four bits of metadata


def two_of_four(members: Sequence[tuple[ir.Value, int]], *, signed: bool) -> PackedPair:
    """Selects two of four members, each a word and which half of it, 0 (low) or 1."""
    a, b, c, d = (_key(word, half, position, signed) for position, (word, half) in enumerate(members))
    larger, other_larger = arith.maxui(a, b), arith.maxui(c, d)
    smaller, other_smaller = arith.minui(a, b), arith.minui(c, d)
    largest = arith.maxui(larger, other_larger)
    second = arith.maxui(arith.minui(larger, other_larger), arith.maxui(smaller, other_smaller))
    # With 3 - position at the top, followed by the 16 bits of the value, the larger is the one that comes first.
    rotated = [llvm.intr_fshr(key, key, i32(3 if signed else 2)) for key in (largest, second)]
    first, last = arith.maxui(*rotated), arith.minui(*rotated)
    values = mgpu_utils.prmt(arith.shli(first, i32(2)), arith.shli(last, i32(2)), i32(_HIGH_HALVES))
    from_the_end = arith.ori(arith.shrui(first, i32(30)), arith.andi(arith.shrui(last, i32(28)), i32(12)))
    return PackedPair(values, arith.xori(from_the_end, i32(15)))


def take_two(words: Sequence[ir.Value], nibble: ir.Value) -> ir.Value:
    """Takes the two members, of four in two words, that a group's metadata names."""
    first, second = arith.andi(nibble, i32(3)), arith.shrui(nibble, i32(2))
    selector = arith.addi(arith.muli(first, i32(0x22)), arith.muli(second, i32(0x2200)))
    return mgpu_utils.prmt(*words, arith.addi(selector, i32(0x1010)))


def groups(words: Sequence[ir.Value]) -> list[list[tuple[ir.Value, int]]]:
    """Splits words into the members of each group of neighbours."""
    return [[(word, half) for word in words[i : i + 2] for half in range(2)] for i in range(0, len(words), 2)]


def zip_halves(a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Joins the low halves of two words to one word, and the high halves."""
    return tuple(mgpu_utils.prmt(a, b, i32(selector)) for selector in (_LOW_HALVES, _HIGH_HALVES))


def squared_relu(word: ir.Value, element: ir.Type) -> ir.Value:
    """Computes relu(h)^2 of two 16-bit floats, rounded to their dtype. NaN stays NaN.

    float32 holds the product of two 16-bit floats exactly, so that the one taken here, rounded once, is the same.
    """
    h = as_pair(word, element)
    zero = arith.constant(h.type, ir.DenseElementsAttr.get_splat(h.type, ir.FloatAttr.get(element, 0.0)))
    relu = arith.maximumf(h, zero)
    return as_word(arith.mulf(relu, relu))


def unpack(word: ir.Value, element: ir.Type) -> list[ir.Value]:
    """Converts both halves to float32."""
    pair = as_pair(word, element)
    return widen([llvm.extractelement(pair, i32(i)) for i in range(2)])


def pack(low: ir.Value, high: ir.Value, element: ir.Type) -> ir.Value:
    """Rounds two float32 to `element` and joins them to a word."""
    pair = llvm.mlir_undef(ir.VectorType.get((2,), ir.F32Type.get()))
    for i, value in enumerate((low, high)):
        pair = llvm.insertelement(pair, value, i32(i))
    return as_word(arith.truncf(ir.VectorType.get((2,), element), pair))


def as_pair(word: ir.Value, element: ir.Type) -> ir.Value:
    """Reinterprets a word as a vector of its halves, the low one first."""
    return llvm.bitcast(ir.VectorType.get((2,), element), word)


def as_word(pair: ir.Value) -> ir.Value:
    """Inverts `as_pair`."""
    return llvm.bitcast(i32_type(), pair)


def _key(word: ir.Value, half: int, position: int, signed: bool) -> ir.Value:
    tie_break = 3 - position
    if signed:
        # The rotation brings the magnitude to the top and the sign to the bottom.
        rotated = llvm.intr_fshl(word, word, i32(1 if half else 17))
        return arith.ori(arith.andi(rotated, i32(~0x1FFFE)), i32(tie_break << 1))
    top = arith.andi(word, i32(~0xFFFF)) if half else arith.shli(word, i32(16))
    return arith.ori(top, i32(tie_break))
