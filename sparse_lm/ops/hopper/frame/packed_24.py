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
from jaxlib.mlir.dialects import arith, llvm, math

from sparse_lm.ops.hopper.frame import emit
from sparse_lm.ops.hopper.frame.emit import Number, elements, f32, i32, i32_type, maximum, minimum, vector, widen
from sparse_lm.ops.hopper.frame.two_of_four import positions


class PackedPair(NamedTuple):
    """The two survivors of a group of four."""

    values: Number  # a word, the first in its low half
    nibble: Number  # their four bits of metadata


def two_of_four(members: Sequence[tuple[Number, int]], *, signed: bool) -> PackedPair:
    """Selects two of four members, each a word and which half of it, 0 (low) or 1."""
    a, b, c, d = (_key(word, half, position, signed) for position, (word, half) in enumerate(members))
    larger, other_larger = maximum(a, b), maximum(c, d)
    smaller, other_smaller = minimum(a, b), minimum(c, d)
    largest = maximum(larger, other_larger)
    second = maximum(minimum(larger, other_larger), maximum(smaller, other_smaller))
    # With 3 - position at the top, followed by the 16 bits of the value, the larger is the one that comes first.
    rotated = [Number(llvm.intr_fshr(key, key, i32(3 if signed else 2))) for key in (largest, second)]
    first, last = maximum(*rotated), minimum(*rotated)
    values = _bytes_of(first << 2, last << 2, i32(emit.HIGH_HALVES))
    from_the_end = (first >> 30) | ((last >> 28) & 12)
    return PackedPair(values, from_the_end ^ 15)


def take_two(words: Sequence[Number], nibble: Number) -> Number:
    """Takes the two members, of four in two words, that a group's metadata names."""
    first, second = positions(nibble)
    return _bytes_of(*words, first * 0x22 + second * 0x2200 + 0x1010)


def zip_halves(a: Number, b: Number) -> tuple[Number, Number]:
    """Joins the low halves of two words to one word, and the high halves."""
    return tuple(_bytes_of(a, b, i32(selector)) for selector in (emit.LOW_HALVES, emit.HIGH_HALVES))


def squared_relu(word: Number, element: ir.Type) -> Number:
    """Computes relu(h)^2 of two 16-bit floats, rounded to their dtype. NaN stays NaN.

    float32 holds the product of two 16-bit floats exactly, so that the one taken here, rounded once, is the same.
    """
    h = _as_pair(word, element)
    zero = arith.constant(h.type, ir.DenseElementsAttr.get_splat(h.type, ir.FloatAttr.get(element, 0.0)))
    relu = arith.maximumf(h, zero)
    return _as_word(arith.mulf(relu, relu))


def squared_relu_gradient(dy: Number, y: Number, element: ir.Type) -> Number:
    """Computes 2 sqrt(y) dy of two 16-bit floats."""
    slopes = (f32(2.0) * math.sqrt(value) for value in unpack(y, element))
    return pack(*(d * slope for d, slope in zip(unpack(dy, element), slopes, strict=True)), element)


def add_products(total: Number, a: Number, b: Number, element: ir.Type) -> Number:
    """Adds to a float32 the products of two words' low halves and of their high halves."""
    for x, y in zip(unpack(a, element), unpack(b, element), strict=True):
        total = Number(math.fma(x, y, total))
    return total


def times(word: Number, factor: Number, element: ir.Type) -> Number:
    """Multiplies two 16-bit floats by one of their dtype, and rounds."""
    return _as_word(arith.mulf(_as_pair(word, element), vector((factor, factor))))


def unpack(word: Number, element: ir.Type) -> list[Number]:
    """Converts both halves to float32."""
    return widen(elements(_as_pair(word, element)))


def pack(low: Number, high: Number, element: ir.Type) -> Number:
    """Rounds two float32 to `element` and joins them to a word."""
    return _as_word(arith.truncf(ir.VectorType.get((2,), element), vector((low, high))))


def _as_pair(word: Number, element: ir.Type) -> ir.Value:
    """Reinterprets a word as a vector of its halves, the low one first."""
    return llvm.bitcast(ir.VectorType.get((2,), element), word)


def _as_word(pair: ir.Value) -> Number:
    """Inverts `_as_pair`."""
    return Number(llvm.bitcast(i32_type(), pair))


def _bytes_of(a: Number, b: Number, selector: Number) -> Number:
    """Makes a word of four of the eight bytes of a and b; each digit of the selector is the number of one."""
    return Number(mgpu_utils.prmt(a, b, selector))


def _key(word: Number, half: int, position: int, signed: bool) -> Number:
    tie_break = 3 - position
    if signed:
        # The rotation brings the magnitude to the top and the sign to the bottom.
        rotated = Number(llvm.intr_fshl(word, word, i32(1 if half else 17)))
        return (rotated & ~0x1FFFE) | (tie_break << 1)
    return (word & ~0xFFFF if half else word << 16) | tie_break
