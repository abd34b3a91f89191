"""Selects two of each four in the registers of a thread: the rules of `sparse_lm.ops.select`, in MLIR."""

from __future__ import annotations

from typing import NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from sparse_lm.ops.hopper.frame.emit import bit_not, f32, i32, i32_type

# Bits of float32.
INF = 0x7F800000
NAN = 0x7FC00000
SIGN = -(2**31)


class Pair(NamedTuple):
    """The two survivors of a group of four."""

    low: ir.Value
    high: ir.Value
    nibble: ir.Value  # their four bits of metadata

    def spread(self, zero: ir.Value) -> list[ir.Value]:
        """Returns the four members, with `zero` for those that do not survive."""
        first, second = arith.andi(self.nibble, i32(3)), arith.shrui(self.nibble, i32(2))

        def member(position):
            is_first, is_second = (arith.cmpi(arith.CmpIPredicate.eq, p, i32(position)) for p in (first, second))
            return arith.select(is_first, self.low, arith.select(is_second, self.high, zero))

        return [member(position) for position in range(4)]


def two_of_four(members: list[ir.Value], method: str = "magnitude") -> Pair:
    """Selects two of a group of float32, by "magnitude" or "soft_threshold"."""
    ranks = [magnitude_rank(member) for member in members]
    wins = {(i, j): arith.cmpi(arith.CmpIPredicate.sge, ranks[i], ranks[j]) for i in range(4) for j in range(i + 1, 4)}

    def kept(i):
        """Returns True if i wins two of its three comparisons."""
        a, b, c = (wins[i, j] if i < j else bit_not(wins[j, i]) for j in range(4) if j != i)
        return arith.ori(arith.andi(a, b), arith.andi(c, arith.ori(a, b)))

    keeps = [kept(i) for i in range(4)]

    def low(options):
        return arith.select(keeps[0], options[0], arith.select(keeps[1], options[1], options[2]))

    def high(options):
        return arith.select(keeps[3], options[3], arith.select(keeps[2], options[2], options[1]))

    positions = [i32(i) for i in range(4)]
    nibble = arith.ori(low(positions), arith.shli(high(positions), i32(2)))
    if method == "magnitude":
        return Pair(low(members), high(members), nibble)
    threshold = _second_smallest(ranks)
    return Pair(*(_shrink(pick(members), pick(ranks), threshold) for pick in (low, high)), nibble)


def magnitude_rank(x: ir.Value) -> ir.Value:
    """Computes `select.magnitude_rank` of one float32."""
    magnitude = arith.andi(arith.bitcast(i32_type(), x), i32(0x7FFFFFFF))
    return arith.select(arith.cmpi(arith.CmpIPredicate.sgt, magnitude, i32(INF)), i32(NAN), magnitude)


def _second_smallest(ranks: list[ir.Value]) -> ir.Value:
    a, b, c, d = ranks
    larger_of_smallest = arith.maxsi(arith.minsi(a, b), arith.minsi(c, d))
    return arith.minsi(larger_of_smallest, arith.minsi(arith.maxsi(a, b), arith.maxsi(c, d)))


def _shrink(x: ir.Value, rank: ir.Value, threshold: ir.Value) -> ir.Value:
    """Computes sign(x) max(|x| - threshold, 0); +0 where |x| equals the threshold, unless x is NaN."""
    sign = arith.andi(arith.bitcast(i32_type(), x), i32(SIGN))
    signed_threshold = arith.bitcast(ir.F32Type.get(), arith.ori(threshold, sign))
    is_nan = arith.cmpi(arith.CmpIPredicate.eq, rank, i32(NAN))
    at_threshold = arith.select(is_nan, x, f32(0.0))
    return arith.select(
        arith.cmpi(arith.CmpIPredicate.sle, rank, threshold), at_threshold, arith.subf(x, signed_threshold)
    )
