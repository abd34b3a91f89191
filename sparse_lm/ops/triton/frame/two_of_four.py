"""Selects two of each four in the registers of a thread: the rules of `sparse_lm.ops.select`, in Triton and Gluon."""

from __future__ import annotations

import triton
import triton.language as tl

_NAN_RANK = tl.constexpr(0x7FC00000)
_INF = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(-(2**31))


@triton.jit
def magnitude_rank(x):
    """Computes `select.magnitude_rank` of float32."""
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(magnitude > _INF, _NAN_RANK, magnitude)


@triton.jit
def members(x):
    """Splits [R, 4 G] into the four members of its groups, [R, G] each."""
    even, odd = tl.split(x.reshape([x.shape[0], x.shape[1] // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _second_smallest(a, b, c, d):
    larger_of_smallest = tl.maximum(tl.minimum(a, b), tl.minimum(c, d))
    return tl.minimum(larger_of_smallest, tl.minimum(tl.maximum(a, b), tl.maximum(c, d)))


@triton.jit
def _shrink(x, rank, threshold):
    """Computes sign(x) max(|x| - threshold, 0); +0 where |x| equals the threshold, unless x is NaN."""
    signed_threshold = (threshold | (x.to(tl.int32, bitcast=True) & _SIGN)).to(tl.float32, bitcast=True)
    return tl.where(rank <= threshold, tl.where(rank == _NAN_RANK, x, 0.0), x - signed_threshold)


@triton.jit
def two_of_four(x, SOFT: tl.constexpr):
    """Selects from float32 [R, 4 G]: two survivors, shrunk if SOFT, and their nibbles of metadata, [R, G] each."""
    a, b, c, d = members(x)
    rank_a, rank_b, rank_c, rank_d = magnitude_rank(a), magnitude_rank(b), magnitude_rank(c), magnitude_rank(d)
    ab, ac, ad = rank_a >= rank_b, rank_a >= rank_c, rank_a >= rank_d
    bc, bd, cd = rank_b >= rank_c, rank_b >= rank_d, rank_c >= rank_d
    # Those that win two of their three comparisons.
    keep_a = (ab & ac) | (ab & ad) | (ac & ad)
    keep_b = (~ab & bc) | (~ab & bd) | (bc & bd)
    keep_c = (~ac & ~bc) | (~ac & cd) | (~bc & cd)
    keep_d = (~ad & ~bd) | (~ad & ~cd) | (~bd & ~cd)
    low = tl.where(keep_a, a, tl.where(keep_b, b, c))
    high = tl.where(keep_d, d, tl.where(keep_c, c, b))
    if SOFT:
        threshold = _second_smallest(rank_a, rank_b, rank_c, rank_d)
        low, high = _shrink(low, magnitude_rank(low), threshold), _shrink(high, magnitude_rank(high), threshold)
    first = tl.where(keep_a, 0, tl.where(keep_b, 1, 2))
    second = tl.where(keep_d, 3, tl.where(keep_c, 2, 1))
    return low, high, first | second << 2


@triton.jit
def spread(low, high, nibble):
    """Returns the matrix [R, 4 G] that survivors and nibbles stand for."""
    first, second = nibble & 3, nibble >> 2
    a = tl.where(first == 0, low, 0)
    b = tl.where(first == 1, low, tl.where(second == 1, high, 0))
    c = tl.where(first == 2, low, tl.where(second == 2, high, 0))
    d = tl.where(second == 3, high, 0)
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape([a.shape[0], 4 * a.shape[1]])


@triton.jit
def pack_words(nibble):
    """Packs nibbles [64, 16] to the 128 words of metadata of a tile; `sparse_lm.ops.formats` has the layout."""
    first, second, third, fourth = members(nibble)
    halves = first | second << 4 | third << 8 | fourth << 12
    low, high = tl.split(halves.reshape([4, 2, 8, 4]).permute([0, 2, 3, 1]))  # warp, g, t
    return (low | high << 16).reshape([128])


@triton.jit
def unpack_words(words):
    """Inverts `pack_words`: 128 words of metadata to nibbles [64, 16]."""
    words = words.reshape([4, 8, 4])  # warp, g, t
    halves = tl.join(words & 0xFFFF, words >> 16 & 0xFFFF).permute([0, 3, 1, 2]).reshape([64, 4])
    even, odd = tl.join(halves & 15, halves >> 8 & 15), tl.join(halves >> 4 & 15, halves >> 12)
    return tl.join(even, odd).reshape([64, 16])
