"""Selects two of each four in the registers of a thread: the rules of `sparse_lm.ops.select`, in MLIR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxlib.mlir.dialects import arith

from sparse_lm.ops.hopper.frame.emit import Number, f32, i32, select

# Bits of float32.
INF = 0x7F800000
NAN = 0x7FC00000
SIGN = -(2**31)


class Pair(NamedTuple):
    """The two survivors of a group of four."""

    low: Number
    high: Number
    nibble: Number  # their four bits of metadata

    def spread(self) -> list[Number]:
        """Returns the four members, with zeros for those that do not survive."""
        zero, kept_at = f32(0.0), positions(self.nibble)

        def member(position):
            is_first, is_second = (kept.compare("eq", position) for kept in kept_at)
            return select(is_first, self.low, select(is_second, self.high, zero))

        return [member(position) for position in range(4)]


def groups_of_four(members: Sequence[Number]) -> list[list[Number]]:
    """Splits neighbours into groups of four."""
    return [list(members[first : first + 4]) for first in range(0, len(members), 4)]


def positions(nibble: Number) -> tuple[Number, Number]:
    """Returns the positions of the two survivors that a group's metadata names."""
    return nibble & 3, nibble >> 2


def two_of_four(members: list[Number], *, shrink: bool) -> Pair:
    """Selects the two largest of a group of float32, shrunk as `select.soft_threshold` does if `shrink`."""
    ranks = [magnitude_rank(member) for member in members]
    wins = {(i, j): ranks[i].compare("sge", ranks[j]) for i in range(4) for j in range(i + 1, 4)}

    def kept(i):
        """Returns True if i wins two of its three comparisons."""
        a, b, c = (wins[i, j] if i < j else wins[j, i] ^ 1 for j in range(4) if j != i)
        return (a & b) | (c & (a | b))

    keeps = [kept(i) for i in range(4)]

    def low(options):
        return select(keeps[0], options[0], select(keeps[1], options[1], options[2]))

    def high(options):
        return select(keeps[3], options[3], select(keeps[2], options[2], options[1]))

    numbers = [i32(i) for i in range(4)]
    nibble = low(numbers) | (high(numbers) << 2)
    if not shrink:
        return Pair(low(members), high(members), nibble)
    threshold = _second_smallest(ranks)
    return Pair(*(_shrink(pick(members), pick(ranks), threshold) for pick in (low, high)), nibble)


def magnitude_rank(x: Number) -> Number:
    """Computes `select.magnitude_rank` of one float32."""
    magnitude = x.bits() & 0x7FFFFFFF
    return select(magnitude.compare("sgt", INF), i32(NAN), magnitude)


def _second_smallest(ranks: list[Number]) -> Number:
    a, b, c, d = ranks
    larger_of_smallest = arith.maxsi(arith.minsi(a, b), arith.minsi(c, d))
    return Number(arith.minsi(larger_of_smallest, arith.minsi(arith.maxsi(a, b), arith.maxsi(c, d))))


def _shrink(x: Number, rank: Number, threshold: Number) -> Number:
    """Computes sign(x) max(|x| - threshold, 0); +0 where |x| equals the threshold, unless x is NaN."""
    signed_threshold = (threshold | (x.bits() & SIGN)).as_float()
    at_threshold = select(rank.compare("eq", NAN), x, f32(0.0))
    return select(rank.compare("sle", threshold), at_threshold, x - signed_threshold)
