"""`sparse_lm.ops.mvue` in the registers of a thread: two of a group of four drawn at random, without bias.

The random bits are those of `jax.random.bits`, made where they are used: they would be as many bytes as the matrix.
Numerics: float32 with approximate reciprocals (2 ulp); a draw may differ from the reference's where a random number
comes as close to the edge between two members.
"""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math

from sparse_lm.ops.hopper.emit import f32, i32, i32_type, sum_of
from sparse_lm.ops.hopper.two_of_four import Pair
from sparse_lm.ops.mvue import FLOOR

_INF = 0x7F800000
_ONE = 0x3F800000
_SMALLEST_NORMAL = 2.0**-126

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = 0x1BD11BDA


def sample_two(members: list[ir.Value], bits: ir.Value) -> Pair:
    """The estimates of two members, float32, and their metadata; `bits` are 32 random ones."""
    peak = math.absf(members[0])
    for member in members[1:]:
        peak = arith.maximumf(peak, math.absf(member))
    finite = arith.cmpf(arith.CmpFPredicate.OLT, peak, _constant(_INF))
    drawable = arith.andi(finite, arith.cmpf(arith.CmpFPredicate.OGT, peak, f32(0.0)))
    inverse_peak = _reciprocal(arith.maximumf(peak, f32(_SMALLEST_NORMAL)))
    weights = [
        arith.select(finite, math.fma(math.absf(member), inverse_peak, f32(FLOOR)), f32(1.0)) for member in members
    ]
    numbers = (
        arith.select(drawable, _uniform(half), f32(0.0))
        for half in (arith.andi(bits, i32(0xFFFF)), arith.shrui(bits, i32(16)))
    )
    one = _draw(weights, next(numbers))
    left = [arith.select(_equal(one, position), f32(0.0), weight) for position, weight in enumerate(weights)]
    two = _draw(left, next(numbers))
    first, second = arith.minui(one, two), arith.maxui(one, two)

    inverses = _inverse_probabilities(weights)
    estimates = [
        arith.select(finite, arith.mulf(member, inverse), _constant(0x7FC00000))
        for member, inverse in zip(members, inverses, strict=True)
    ]
    low = arith.select(_equal(first, 0), estimates[0], arith.select(_equal(first, 1), estimates[1], estimates[2]))
    high = arith.select(_equal(second, 3), estimates[3], arith.select(_equal(second, 2), estimates[2], estimates[1]))
    return Pair(low, high, arith.ori(first, arith.shli(second, i32(2))))


def random_bits(key: tuple[ir.Value, ir.Value], index: ir.Value) -> ir.Value:
    """Element `index` of `jax.random.bits(key, shape)`, of fewer than 2^32 elements: Threefry-2x32 (Salmon, 2011)."""
    schedule = [*key, arith.xori(arith.xori(*key), i32(_PARITY))]
    x, y = schedule[0], arith.addi(index, schedule[1])
    for number in range(5):
        for rotation in _ROTATIONS[number % 2]:
            x = arith.addi(x, y)
            y = arith.xori(llvm.intr_fshl(y, y, i32(rotation)), x)
        x = arith.addi(x, schedule[(number + 1) % 3])
        y = arith.addi(y, arith.addi(schedule[(number + 2) % 3], i32(number + 1)))
    return arith.xori(x, y)


def _uniform(half: ir.Value) -> ir.Value:
    """16 bits to a number between 0 and 1: (half + 0.5) / 2^16."""
    above_one = arith.bitcast(ir.F32Type.get(), arith.ori(arith.shli(half, i32(7)), i32(_ONE)))
    return arith.addf(above_one, f32(2.0**-17 - 1))


def _draw(weights: list[ir.Value], uniform: ir.Value) -> ir.Value:
    """A position, drawn in proportion to the weights; never one of weight zero."""
    edges = [weights[0]]
    for weight in weights[1:]:
        edges.append(arith.addf(edges[-1], weight))
    target = arith.mulf(uniform, edges[3])
    position = i32(0)
    for edge in edges[:3]:
        is_past = arith.cmpf(arith.CmpFPredicate.OGE, target, edge)
        position = arith.addi(position, arith.extui(i32_type(), is_past))
    return position


def _inverse_probabilities(weights: list[ir.Value]) -> list[ir.Value]:
    """One over the probability that each member is one of two drawn without replacement."""

    def sums_of_others(numbers):
        """No cancellation."""
        halves = arith.addf(*numbers[2:]), arith.addf(*numbers[:2])
        return [arith.addf(numbers[i ^ 1], halves[i // 2]) for i in range(4)]

    total = sum_of(weights)
    ratios = [arith.mulf(w, _reciprocal(rest)) for w, rest in zip(weights, sums_of_others(weights), strict=True)]
    return [
        arith.mulf(total, _reciprocal(math.fma(weight, others, weight)))
        for weight, others in zip(weights, sums_of_others(ratios), strict=True)
    ]


def _reciprocal(x: ir.Value) -> ir.Value:
    return llvm.inline_asm(ir.F32Type.get(), [x], "rcp.approx.ftz.f32 $0, $1;", "=f,f")


def _equal(position: ir.Value, constant: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, position, i32(constant))


def _constant(bits: int) -> ir.Value:
    return arith.bitcast(ir.F32Type.get(), i32(bits))
