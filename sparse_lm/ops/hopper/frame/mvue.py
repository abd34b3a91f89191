"""`sparse_lm.ops.mvue` in the registers of a thread: two of a group of four drawn at random, without bias.

The random bits are those of `jax.random.bits`, made where they are used: they would be half as many bytes as a matrix
of 16-bit floats. Numerics: those of the reference bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math

from sparse_lm.ops.hopper.frame.emit import f32, global_pointer, i32, i32_type
from sparse_lm.ops.hopper.frame.two_of_four import INF, NAN, SIGN, Pair

_ONE = 0x3F800000  # bits of 1 in float32
_HALF_A_UNIT = 1 << 6  # 2^-17 in the mantissa of a number between 1 and 2

# Threefry-2x32: rotations of four rounds each, by turns, and the parity constant of the key schedule.
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = 0x1BD11BDA


def load_key(key: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Loads `sparse_lm.ops.mvue.threefry_key` from global memory."""
    pointers = (mgpu_utils.getelementptr(global_pointer(key), [i32(word)], i32_type()) for word in range(2))
    return tuple(llvm.load(i32_type(), pointer) for pointer in pointers)


def sample_two(members: Sequence[ir.Value], above_one: ir.Value) -> Pair:
    """Estimates two members, float32, and gives their metadata; `above_one` is of `uniform_above_one`."""
    a, b, c, d = (math.absf(member) for member in members)
    ab, cd = arith.addf(a, b), arith.addf(c, d)
    total = arith.addf(ab, cd)
    total = arith.select(arith.cmpf(arith.CmpFPredicate.OLT, total, _constant(INF)), total, _constant(NAN))
    half = arith.mulf(total, f32(0.5))
    for others in (arith.addf(b, cd), arith.addf(a, cd), arith.addf(d, ab), arith.addf(c, ab)):
        half = arith.minimumf(half, others)
    length = arith.select(_greater(half, f32(0.0)), half, total)
    edges = [arith.minimumf(a, length)]
    for size in (b, c):
        edges.append(arith.addf(edges[-1], arith.minimumf(size, length)))

    point = arith.mulf(arith.subf(above_one, f32(1.0)), length)
    second_point = arith.mulf(above_one, length)
    past_a, past_b = _greater(point, edges[0]), _greater(point, edges[1])
    second_past_b = arith.ori(_greater(second_point, edges[1]), past_a)
    second_past_c = arith.ori(_greater(second_point, edges[2]), past_b)

    def first_of(a, b, c):
        return arith.select(past_b, c, arith.select(past_a, b, a))

    def second_of(b, c, d):
        return arith.select(second_past_c, d, arith.select(second_past_b, c, b))

    nibble = arith.ori(first_of(i32(0), i32(1), i32(2)), second_of(i32(4), i32(8), i32(12)))
    low, high = first_of(*members[:3]), second_of(*members[1:])
    return Pair(_estimate(low, half), _estimate(high, half), nibble)


def uniform_above_one(word: ir.Value) -> list[ir.Value]:
    """Computes 1 + `sparse_lm.ops.mvue.uniform_of_groups` of the two groups that share 32 random bits, for
    `sample_two`."""
    halves = arith.shli(arith.andi(word, i32(0xFFFF)), i32(7)), arith.shli(arith.shrui(word, i32(16)), i32(7))
    return [_bitcast(arith.ori(half, i32(_ONE | _HALF_A_UNIT))) for half in halves]


def random_bits(key: tuple[ir.Value, ir.Value], index: ir.Value) -> ir.Value:
    """Computes element `index` of `jax.random.bits(key, shape)`, of fewer than 2^32: Threefry-2x32-20 (Salmon,
    2011)."""
    schedule = [*key, arith.xori(arith.xori(*key), i32(_PARITY))]
    x, y = schedule[0], arith.addi(index, schedule[1])
    for number in range(5):
        for rotation in _ROTATIONS[number % 2]:
            x = arith.addi(x, y)
            y = arith.xori(llvm.intr_fshl(y, y, i32(rotation)), x)
        x = arith.addi(x, schedule[(number + 1) % 3])
        y = arith.addi(y, arith.addi(schedule[(number + 2) % 3], i32(number + 1)))
    return arith.xori(x, y)


def _estimate(member: ir.Value, half: ir.Value) -> ir.Value:
    """Computes sign(x) max(|x|, half)."""
    magnitude = arith.bitcast(i32_type(), arith.maximumf(math.absf(member), half))
    return _bitcast(arith.ori(magnitude, arith.andi(arith.bitcast(i32_type(), member), i32(SIGN))))


def _greater(x: ir.Value, y: ir.Value) -> ir.Value:
    return arith.cmpf(arith.CmpFPredicate.OGT, x, y)


def _constant(bits: int) -> ir.Value:
    return _bitcast(i32(bits))


def _bitcast(bits: ir.Value) -> ir.Value:
    return arith.bitcast(ir.F32Type.get(), bits)
