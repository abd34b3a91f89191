"""Selects two of each four 16-bit floats, held in pairs in words of 32 bits, as they lie in memory.

Why: with a number of 32 bits each, selection in 16-bit matrices (two_of_four.py) takes longer than their bytes do.
Here each member of a group gets the key that `sparse_lm.ops.hopper.frame.packed_24` gives it, and explains.
"""

from __future__ import annotations

import triton
import triton.language as tl

_HIGH_HALF = tl.constexpr(-(2**16))
_EACH_MAGNITUDE = tl.constexpr(0x7FFF7FFF)
_EACH_ONE = tl.constexpr(0x00010001)


@triton.constexpr_function
def _kind(dtype):
    """Returns what PTX calls two numbers of a dtype in a word."""
    return dtype.name.replace("fp", "f") + "x2"


@triton.jit
def _key(word, POSITION: tl.constexpr, HIGH: tl.constexpr, SIGNED: tl.constexpr):
    """Computes the key of the member at a position of its group, in the high half of a word or in the low one."""
    word = word.to(tl.uint32, bitcast=True)
    if SIGNED:  # the rotation brings the magnitude to the top and the sign to the bottom
        left: tl.constexpr = 1 if HIGH else 17
        return (word << left | word >> 32 - left) & 0xFFFE0001 | (3 - POSITION) << 1
    elif HIGH:
        return word & 0xFFFF0000 | 3 - POSITION
    else:
        return word << 16 | 3 - POSITION


@triton.jit
def two_of_four(a, b, c, d, SIGNED: tl.constexpr, HIGH: tl.constexpr = None):
    """Selects two of each group of four; returns words of both survivors, and their nibbles of metadata.

    Members are in the low halves of the words, or in the high ones if HIGH; by default as they lie in memory, a and c
    in low halves, b and d in high ones. If not SIGNED, none is negative.
    """
    a, b = _key(a, 0, HIGH, SIGNED), _key(b, 1, HIGH is None or HIGH, SIGNED)
    c, d = _key(c, 2, HIGH, SIGNED), _key(d, 3, HIGH is None or HIGH, SIGNED)
    larger, other_larger = tl.maximum(a, b), tl.maximum(c, d)
    smaller, other_smaller = tl.minimum(a, b), tl.minimum(c, d)
    largest = tl.maximum(larger, other_larger)
    second = tl.maximum(tl.minimum(larger, other_larger), tl.maximum(smaller, other_smaller))
    # With 3 - position at the top, followed by the 16 bits of the value, the larger is the one that comes first.
    shift: tl.constexpr = 3 if SIGNED else 2
    largest, second = largest >> shift | largest << 32 - shift, second >> shift | second << 32 - shift
    first, last = tl.maximum(largest, second), tl.minimum(largest, second)
    values = first >> 14 & 0xFFFF | last << 2 & 0xFFFF0000
    nibble = (first >> 30 | last >> 28 & 12) ^ 15
    return values.to(tl.int32, bitcast=True), nibble.to(tl.int32, bitcast=True)


@triton.jit
def take_two(low, high, nibble):
    """Takes the two members, of four in two words, that a group's metadata names, in one word."""
    of_bytes = (nibble & 3) * 0x22 + (nibble >> 2) * 0x2200 + 0x1010
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, of_bytes], tl.int32, True, 1)


@triton.jit
def zip_halves(a, b):
    """Joins the low halves of two words to one word, and the high halves."""
    return a & 0xFFFF | b << 16, (a >> 16) & 0xFFFF | b & _HIGH_HALF


@triton.jit
def squared_relu(word, dtype: tl.constexpr):
    """Computes relu(h)^2 of both halves, each rounded once; the addend of the product is -0, which changes nothing."""
    kind: tl.constexpr = _kind(dtype)
    assembly: tl.constexpr = f"""{{ .reg .b32 zero, negative_zero, positive;
        mov.b32 zero, 0; mov.b32 negative_zero, 0x80008000;
        max.NaN.{kind} positive, $1, zero; fma.rn.{kind} $0, positive, positive, negative_zero; }}"""
    return tl.inline_asm_elementwise(assembly, "=r,r", [word], tl.int32, True, 1)


@triton.jit
def unpack(word, dtype: tl.constexpr):
    """Converts both halves to float32."""
    low, high = word.to(tl.int16), (word >> 16).to(tl.int16)
    return low.to(dtype, bitcast=True).to(tl.float32), high.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def pack(low, high, dtype: tl.constexpr):
    """Rounds two float32 to `dtype` and joins them to a word."""
    assembly: tl.constexpr = f"cvt.rn.{_kind(dtype)}.f32 $0, $2, $1;"
    return tl.inline_asm_elementwise(assembly, "=r,f,f", [low, high], tl.int32, True, 1)


@triton.jit
def mark_nonzeros(word):
    """Marks each half that is not zero with a one."""
    return ((word & _EACH_MAGNITUDE) + _EACH_MAGNITUDE >> 15) & _EACH_ONE
