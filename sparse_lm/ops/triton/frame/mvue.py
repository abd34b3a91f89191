"""`sparse_lm.ops.mvue` in the registers of a thread block, as `hopper` has it, and bit for bit the reference."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_lm.ops.triton.frame.tiles import FOUR_GROUPS_LAYOUT, GROUPS, indices

_KEYS = gl.constexpr(GROUPS // 4)  # of random bits, for a row of a tile: four groups share one
_ONE_AND_HALF_A_UNIT = tl.constexpr(0x3F800040)  # bits of 1 + 2^-17 in float32
_SIGN = tl.constexpr(-(2**31))
_PARITY = tl.constexpr(0x1BD11BDA)  # of Threefry's key schedule
_ROTATIONS = tl.constexpr(((13, 15, 26, 6), (17, 29, 16, 24)))


@gluon.jit
def uniform_above_one(key, row, k_tile, ROW_STRIDE: gl.constexpr, KEY_STRIDE: gl.constexpr):
    """Computes 1 + `sparse_lm.ops.mvue.uniform_of_groups` of a tile.

    Args:
      key: int32 [2], as `sparse_lm.ops.mvue.threefry_key` gives it.
      row: rows [64, 1] of the 2:4 matrix.
      k_tile: the tile's place in them.
      ROW_STRIDE, KEY_STRIDE: of the array of keys with the random bits, each of which four groups of a row share.

    Returns:
      float32 [64, 16], for `sample_two`.
    """
    number = k_tile * _KEYS + indices(_KEYS, FOUR_GROUPS_LAYOUT, 1)
    bits = tl.interleave(*_split(gl.load(key), gl.load(key + 1), row * ROW_STRIDE + number * KEY_STRIDE))
    return tl.interleave(_above_one(bits & 0xFFFF), _above_one(bits >> 16))


@triton.jit
def _above_one(bits):
    """Computes 1 + (bits + 0.5) / 2^16, of 16 bits."""
    return (bits << 7 | _ONE_AND_HALF_A_UNIT).to(tl.float32, bitcast=True)


@triton.jit
def _split(key, other_key, index):
    """Computes keys of `jax.random.split(key, shape)`, of fewer than 2^32: Threefry-2x32-20 (Salmon, 2011)."""
    key, other_key = key.to(tl.uint32, bitcast=True), other_key.to(tl.uint32, bitcast=True)
    keys = key, other_key, key ^ other_key ^ _PARITY
    x, y = key, index.to(tl.uint32, bitcast=True) + other_key
    for group in tl.static_range(5):
        for turn in tl.static_range(4):
            x = x + y
            y = (y << _ROTATIONS[group % 2][turn] | y >> 32 - _ROTATIONS[group % 2][turn]) ^ x
        x, y = x + keys[(group + 1) % 3], y + (keys[(group + 2) % 3] + (group + 1))
    return x, y


@gluon.jit
def sample_two(a, b, c, d, above_one):
    """Estimates two of four members of each group, float32 [64, 16]; returns the two and their nibbles of metadata.

    `above_one` is of `uniform_above_one`.
    """
    above_one = gl.convert_layout(above_one, a.type.layout, assert_trivial=True)
    size_a, size_b, size_c, size_d = tl.abs(a), tl.abs(b), tl.abs(c), tl.abs(d)
    ab, cd = size_a + size_b, size_c + size_d
    half = _least((ab + cd) * 0.5, _least(_least(size_a, size_b) + cd, _least(size_c, size_d) + ab))

    point, from_the_end = (above_one - 1) * half, (2 - above_one) * half
    past_a, past_b = point > size_a, point > ab
    in_cd, in_d = (from_the_end < cd) | past_a, (from_the_end < size_d) | past_b
    low = tl.where(past_b, c, tl.where(past_a, b, a))
    high = tl.where(in_d, d, tl.where(in_cd, c, b))
    first = tl.where(past_b, 2, tl.where(past_a, 1, 0))
    second = tl.where(in_d, 12, tl.where(in_cd, 8, 4))
    return _estimate(low, half), _estimate(high, half), first | second


@triton.jit
def _least(x, y):
    """Returns the lesser; NaN if either is."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _estimate(member, half):
    """Computes sign(x) max(|x|, half)."""
    magnitude = tl.maximum(tl.abs(member), half, propagate_nan=tl.PropagateNan.ALL).to(tl.int32, bitcast=True)
    return (magnitude | member.to(tl.int32, bitcast=True) & _SIGN).to(tl.float32, bitcast=True)
