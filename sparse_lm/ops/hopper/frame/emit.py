"""Small pieces of MLIR that the kernels are written in: constants, indices, 16-byte accesses, inline PTX."""

from __future__ import annotations

from collections.abc import Sequence

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

WARP_SIZE = mgpu_utils.WARP_SIZE
WARPGROUP_SIZE = mgpu_utils.WARPGROUP_SIZE

SCALAR = plgpu.Layout.WG_SPLAT(())
# Kernels place their barriers themselves: Pallas would add them around loads and stores that need none.
COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)

_BYTES = 16  # of an access to global memory


def load_vectors(x: ir.Value, start: ir.Value, count: int) -> list[ir.Value]:
    """Loads `count` neighbours of global memory, 16 bytes at a time; `start` is 64 bits wide."""
    element = ir.MemRefType(x.type).element_type
    lanes = vector_lanes(element)
    run = []
    for first in range(0, count, lanes):
        pointer = mgpu_utils.getelementptr(global_pointer(x), [arith.addi(start, i64(first))], element)
        run += elements(llvm.load(ir.VectorType.get((lanes,), element), pointer, alignment=_BYTES))
    return run


def store_vectors(x: ir.Value, start: ir.Value, values: Sequence[ir.Value]) -> None:
    """Stores neighbours of global memory, 16 bytes at a time."""
    element = ir.MemRefType(x.type).element_type
    lanes = vector_lanes(element)
    for first in range(0, len(values), lanes):
        pointer = mgpu_utils.getelementptr(global_pointer(x), [arith.addi(start, i64(first))], element)
        llvm.store(vector(values[first : first + lanes]), pointer, alignment=_BYTES)


def load_words(x: ir.Value, start: ir.Value, count: int) -> list[ir.Value]:
    """Loads `count` neighbouring words of a matrix of 16-bit elements, from element `start`, 16 bytes at a time."""
    words = []
    for pointer in _vector_pointers(x, start, count):
        words += elements(llvm.load(ir.VectorType.get((4,), i32_type()), pointer, alignment=_BYTES))
    return words


def store_words(x: ir.Value, start: ir.Value, words: Sequence[ir.Value]) -> None:
    """Stores neighbouring words of a matrix of 16-bit elements, 16 bytes at a time."""
    for number, pointer in enumerate(_vector_pointers(x, start, len(words))):
        llvm.store(vector(words[4 * number : 4 * number + 4]), pointer, alignment=_BYTES)


def _vector_pointers(x: ir.Value, start: ir.Value, words: int) -> list[ir.Value]:
    element = ir.MemRefType(x.type).element_type
    firsts = (arith.addi(start, i64(2 * word)) for word in range(0, words, 4))
    return [mgpu_utils.getelementptr(global_pointer(x), [first], element) for first in firsts]


def store_if(condition: ir.Value, pointer: ir.Value, words: Sequence[ir.Value], space: str = "global") -> None:
    """Stores four words of 32 bits, or one of 32 or 16, to "global" or "shared" memory if the condition holds.

    A predicate, and no branch.
    """
    match len(words), words[0].type.width:
        case 4, 32:
            store, constraints = "v4.b32 [$1], {$2, $3, $4, $5}", "r,l,r,r,r,r"
        case 1, 32:
            store, constraints = "u32 [$1], $2", "r,l,r"
        case 1, 16:
            store, constraints = "u16 [$1], $2", "r,l,h"
        case count, width:
            raise ValueError(f"stores 4 words of 32 bits or 1 of 32 or 16, not {count} of {width}")
    code = f"{{ .reg .pred p; setp.ne.u32 p, $0, 0; @p st.{space}.{store}; }}"
    ptx(code, constraints, [arith.extui(i32_type(), condition), pointer, *words])


def ptx(code: str, constraints: str, operands: Sequence[ir.Value], result: ir.Type | None = None) -> ir.Value:
    """Emits inline PTX that the compiler neither drops nor moves past other such.

    Args:
      code: instructions; $0 is the result, if there is one, and operands follow.
      constraints: LLVM's, of the result and of each operand.
      operands: values that the code reads.
      result: its type; void by default.
    """
    result = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(result, list(operands), code, constraints, has_side_effects=True)


def global_pointer(ref: ir.Value) -> ir.Value:
    """Returns the start of a reference to global memory, in that address space."""
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu_utils.memref_ptr(ref))


def vector_lanes(element: ir.Type) -> int:
    """Counts the elements in 16 bytes."""
    return _BYTES // mgpu_utils.bytewidth(element)


def vector(values: Sequence[ir.Value]) -> ir.Value:
    """Joins values of one type to a vector."""
    result = llvm.mlir_undef(ir.VectorType.get((len(values),), values[0].type))
    for i, value in enumerate(values):
        result = llvm.insertelement(result, value, i32(i))
    return result


def elements(value: ir.Value) -> list[ir.Value]:
    """Splits a vector into its elements."""
    return [llvm.extractelement(value, i32(i)) for i in range(ir.VectorType(value.type).shape[0])]


def widen(values: Sequence[ir.Value]) -> list[ir.Value]:
    """Converts to float32."""
    f32 = ir.F32Type.get()
    return [value if value.type == f32 else arith.extf(f32, value) for value in values]


def narrow(values: Sequence[ir.Value], element: ir.Type) -> list[ir.Value]:
    """Rounds float32 to `element`."""
    return [value if value.type == element else arith.truncf(element, value) for value in values]


def sum_of(values: Sequence[ir.Value]) -> ir.Value:
    """Adds floats up, in their order."""
    total = values[0]
    for value in values[1:]:
        total = arith.addf(total, value)
    return total


def warp_sum(x: ir.Value) -> ir.Value:
    """Adds up the lanes of a warp; every lane has the sum."""
    for distance in (16, 8, 4, 2, 1):
        x = arith.addf(x, mgpu_utils.shfl_bfly(x, distance))
    return x


def times(a: ir.Value, factor: int) -> ir.Value:
    """Multiplies a 32-bit index by a constant."""
    return arith.muli(a, i32(factor))


def mul64(a: ir.Value, factor: int) -> ir.Value:
    """Multiplies a 32-bit index by a constant, in 64 bits."""
    return arith.muli(arith.extui(i64_type(), a), i64(factor))


def bit_not(a: ir.Value) -> ir.Value:
    """Inverts one bit."""
    return arith.xori(a, arith.constant(ir.IntegerType.get_signless(1), 1))


def true() -> ir.Value:
    """Returns one bit that is set."""
    return arith.constant(ir.IntegerType.get_signless(1), 1)


def f32(value: float) -> ir.Value:
    return arith.constant(ir.F32Type.get(), value)


def i32_type() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i64_type() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def i32(value: int) -> ir.Value:
    return arith.constant(i32_type(), value)


def i64(value: int) -> ir.Value:
    return arith.constant(i64_type(), value)
