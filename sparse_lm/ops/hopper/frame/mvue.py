"""`sparse_lm.ops.mvue` in the registers of a thread: two of a group of four drawn at random, without bias.

The random bits are those of `jax.random.split`, made where they are used: they would be half as many bytes as a matrix
of 16-bit floats. Numerics: those of the reference bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, math

from sparse_lm.ops.hopper.frame import packed_24
from sparse_lm.ops.hopper.frame.emit import Number, f32, global_memory, i32, maximum, minimum, select
from sparse_lm.ops.hopper.frame.packed_24 import PackedPair
from sparse_lm.ops.hopper.frame.two_of_four import SIGN, Pair, groups_of_four

_ONE_AND_HALF_A_UNIT = 0x3F800040  # bits of 1 + 2^-17 in float32

# Threefry-2x32: rotations of four rounds each, by turns, and the parity constant of the key schedule.
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = 0x1BD11BDA


def load_key(key: ir.Value) -> tuple[Number, Number]:
    """Loads `sparse_lm.ops.mvue.threefry_key` from global memory."""
    return tuple(global_memory(key).load(i32(word)) for word in range(2))


def sample_two(members: Sequence[Number], above_one: Number) -> Pair:
    """Estimates two members, float32, and gives their metadata; `above_one` is of `uniform_above_one`."""
    a, b, c, d = map(_magnitude, members)
    ab, cd = a + b, c + d
    half = minimum((ab + cd) * 0.5, minimum(minimum(a, b) + cd, minimum(c, d) + ab))

    point, from_the_end = (above_one - 1.0) * half, (f32(2.0) - above_one) * half
    past_a, past_b = point.compare("OGT", a), point.compare("OGT", ab)
    in_cd, in_d = from_the_end.compare("OLT", cd) | past_a, from_the_end.compare("OLT", d) | past_b

    def first_of(a, b, c):
        return select(past_b, c, select(past_a, b, a))

    def second_of(b, c, d):
        return select(in_d, d, select(in_cd, c, b))

    nibble = first_of(i32(0), i32(1), i32(2)) | second_of(i32(4), i32(8), i32(12))
    low, high = first_of(*members[:3]), second_of(*members[1:])
    return Pair(_estimate(low, half), _estimate(high, half), nibble)


def sample_halves(
    key: tuple[Number, Number],
    words: Sequence[Number],
    place: tuple[Number, Number, int],
    halves: Sequence[int],
    element: ir.Type,
) -> list[list[PackedPair]]:
    """Draws two of each four of 16 numbers, the low (0) or high (1) halves of 16 words, for each of `halves`.

    `place` says where they are in a transpose, for their random bits: first column, row, how many rows.
    """
    pairs, (column, row, rows) = [[] for _ in halves], place
    above_one = uniform_above_one(key, (column >> 4) * rows + row)
    for number, four in enumerate(groups_of_four(words)):
        members = list(zip(*(packed_24.unpack(word, element) for word in four), strict=True))
        for kept, half in zip(pairs, halves, strict=True):
            pair = sample_two(members[half], above_one[number])
            kept.append(PackedPair(packed_24.pack(pair.low, pair.high, element), pair.nibble))
    return pairs


def uniform_above_one(key: tuple[Number, Number], index: Number) -> list[Number]:
    """Computes 1 + `sparse_lm.ops.mvue.uniform_of_groups` of the four groups that share a key of this index."""
    halves = ((word & 0xFFFF, word >> 16) for word in _split(key, index))
    return [(half << 7 | _ONE_AND_HALF_A_UNIT).as_float() for half in itertools.chain(*halves)]


def _split(key: tuple[Number, Number], index: Number) -> tuple[Number, Number]:
    """Computes a key of `jax.random.split(key, shape)`, of fewer than 2^32: Threefry-2x32-20 (Salmon, 2011)."""
    schedule = [*key, key[0] ^ key[1] ^ _PARITY]
    x, y = schedule[0], index + schedule[1]
    for number in range(5):
        for rotation in _ROTATIONS[number % 2]:
            x = x + y
            y = Number(llvm.intr_fshl(y, y, i32(rotation))) ^ x
        x = x + schedule[(number + 1) % 3]
        y = y + (schedule[(number + 2) % 3] + (number + 1))
    return x, y


def _estimate(member: Number, half: Number) -> Number:
    """Computes sign(x) max(|x|, half)."""
    magnitude = maximum(_magnitude(member), half).bits()
    return (magnitude | (member.bits() & SIGN)).as_float()


def _magnitude(x: Number) -> Number:
    return Number(math.absf(x))
