"""The language in which threads are programmed: numbers with operators, memory, 16-byte accesses, inline PTX.

All of it emits MLIR: an expression's instructions follow one another as Python evaluates it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

WARP_SIZE = mgpu_utils.WARP_SIZE
WARPGROUP_SIZE = mgpu_utils.WARPGROUP_SIZE

SCALAR = plgpu.Layout.WG_SPLAT(())
# Kernels place their barriers themselves: Pallas would add them around loads and stores that need none.
COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)

LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632  # of two words: the bytes that `prmt` takes to join these to one

_BYTES = 16  # of an access to global memory


def _operator(of_integers: Callable, of_floats: Callable | None = None) -> Callable[[Number, Number | float], Number]:
    def apply(self, other):
        return Number((of_floats if self.is_float else of_integers)(self, self._constant(other)))

    return apply


class Number(ir.Value):
    """A thread's number, float32 or an integer without a sign; a number of Python's beside it is a constant."""

    __add__ = _operator(arith.addi, arith.addf)
    __sub__ = _operator(arith.subi, arith.subf)
    __mul__ = _operator(arith.muli, arith.mulf)
    __floordiv__ = _operator(arith.divui)
    __mod__ = _operator(arith.remui)
    __lshift__ = _operator(arith.shli)
    __rshift__ = _operator(arith.shrui)
    __and__ = _operator(arith.andi)
    __or__ = _operator(arith.ori)
    __xor__ = _operator(arith.xori)

    def compare(self, predicate: str, other: Number | float) -> Number:
        """Returns a bit; MLIR's name of the predicate says whether integers have a sign."""
        compare, predicates = (arith.cmpf, arith.CmpFPredicate) if self.is_float else (arith.cmpi, arith.CmpIPredicate)
        return Number(compare(predicates[predicate], self, self._constant(other)))

    def wide(self) -> Number:
        """Converts an index to 64 bits."""
        return Number(arith.extui(i64_type(), self))

    def bits(self) -> Number:
        """Reinterprets a float as an integer."""
        return Number(arith.bitcast(i32_type(), self))

    def as_float(self) -> Number:
        """Inverts `bits`."""
        return Number(arith.bitcast(ir.F32Type.get(), self))

    @property
    def is_float(self) -> bool:
        return self.type == ir.F32Type.get()

    def _constant(self, other: Number | float) -> ir.Value:
        return other if isinstance(other, ir.Value) else arith.constant(self.type, other)


def f32(value: float) -> Number:
    return Number(arith.constant(ir.F32Type.get(), value))


def i32(value: int) -> Number:
    return Number(arith.constant(i32_type(), value))


def true() -> Number:
    return Number(arith.constant(ir.IntegerType.get_signless(1), 1))


def i32_type() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i64_type() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def scalar(array: mgpu_utils.FragmentedArray) -> Number:
    """Returns what each thread has of an array of layout `SCALAR`."""
    return Number(array.registers.item())


def select(condition: Number, if_true: Number, if_false: Number) -> Number:
    """Returns one of two numbers, by a bit."""
    return Number(arith.select(condition, if_true, if_false))


def minimum(a: Number, b: Number) -> Number:
    """Returns the smaller of two floats, NaN if either is, or of two integers."""
    return Number((arith.minimumf if a.is_float else arith.minui)(a, b))


def maximum(a: Number, b: Number) -> Number:
    """Returns the larger of two floats, NaN if either is, or of two integers."""
    return Number((arith.maximumf if a.is_float else arith.maxui)(a, b))


def thread_index() -> Number:
    """Returns this thread's number in its block."""
    return Number(mgpu_utils.thread_idx())


def thread_of_warpgroup() -> Number:
    """Returns this thread's number in its warpgroup."""
    return thread_index() % WARPGROUP_SIZE


def warp_and_lane() -> tuple[Number, Number]:
    """Returns this thread's warp in its warpgroup, and its lane in the warp."""
    thread = thread_of_warpgroup()
    return thread // WARP_SIZE, thread % WARP_SIZE


class Memory(NamedTuple):
    """Elements that follow one another in memory."""

    start: ir.Value
    element: ir.Type

    def at(self, index: Number) -> ir.Value:
        return mgpu_utils.getelementptr(self.start, [index], self.element)

    def load(self, index: Number) -> Number:
        return Number(llvm.load(self.element, self.at(index)))

    def store(self, index: Number, value: Number) -> None:
        llvm.store(value, self.at(index))


def global_memory(ref: ir.Value, element: ir.Type | None = None) -> Memory:
    """Returns the elements of a reference to global memory, in that address space; or others that lie there."""
    start = llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu_utils.memref_ptr(ref))
    return Memory(start, element or element_of(ref))


def shared_memory(ref: ir.Value, element: ir.Type | None = None) -> Memory:
    """Returns the elements of a reference to shared memory, or others that lie there."""
    return Memory(mgpu_utils.memref_ptr(ref), element or element_of(ref))


def element_of(ref: ir.Value) -> ir.Type:
    return ir.MemRefType(ref.type).element_type


def shape_of(ref: ir.Value) -> list[int]:
    return ir.MemRefType(ref.type).shape


def load_vectors(x: ir.Value, start: Number, count: int) -> list[Number]:
    """Loads `count` neighbours of global memory, 16 bytes at a time; `start` is 64 bits wide."""
    return [number for pointer in _pointers(x, start, count) for number in load_vector(pointer, element_of(x))]


def load_words(x: ir.Value, start: Number, count: int) -> list[Number]:
    """Loads `count` neighbouring words of a matrix of 16-bit elements, from element `start`, 16 bytes at a time."""
    return [word for pointer in _pointers(x, start, 2 * count) for word in load_vector(pointer, i32_type())]


def store_words(x: ir.Value, start: Number, words: Sequence[Number]) -> None:
    """Stores neighbouring words of a matrix of 16-bit elements, 16 bytes at a time."""
    for number, pointer in enumerate(_pointers(x, start, 2 * len(words))):
        store_vector(pointer, words[4 * number : 4 * number + 4])


def _pointers(x: ir.Value, start: Number, count: int) -> list[ir.Value]:
    return [global_memory(x).at(start + first) for first in range(0, count, vector_lanes(element_of(x)))]


def load_vector(pointer: ir.Value, element: ir.Type) -> list[Number]:
    """Loads 16 bytes."""
    return elements(llvm.load(ir.VectorType.get((vector_lanes(element),), element), pointer, alignment=_BYTES))


def store_vector(pointer: ir.Value, values: Sequence[Number]) -> None:
    """Stores neighbours at an address that is a multiple of 16 bytes."""
    llvm.store(vector(values), pointer, alignment=_BYTES)


def store_if(condition: Number, pointer: ir.Value, words: Sequence[Number], space: str = "global") -> None:
    """Stores four words of 32 bits, or one of 32 or 16, to "global" or "shared" memory if the condition holds.

    A predicate, and no branch.
    """
    store, constraints = {
        (4, 32): ("v4.b32 [$1], {$2, $3, $4, $5}", "r,l,r,r,r,r"),
        (1, 32): ("u32 [$1], $2", "r,l,r"),
        (1, 16): ("u16 [$1], $2", "r,l,h"),
    }[len(words), words[0].type.width]
    code = f"{{ .reg .pred p; setp.ne.u32 p, $0, 0; @p st.{space}.{store}; }}"
    ptx(code, constraints, [arith.extui(i32_type(), condition), pointer, *words])


def ptx(code: str, constraints: str, operands: Sequence[ir.Value], result: ir.Type | None = None) -> Number:
    """Emits inline PTX that the compiler neither drops nor moves past other such.

    In the code, $0 is the result, if its type is given, and operands follow. Constraints are LLVM's, in that order.
    """
    result = result or ir.Type.parse("!llvm.void")
    return Number(llvm.inline_asm(result, list(operands), code, constraints, has_side_effects=True))


def vector_lanes(element: ir.Type) -> int:
    """Counts the elements in 16 bytes."""
    return _BYTES // mgpu_utils.bytewidth(element)


def vector(values: Sequence[Number]) -> ir.Value:
    result = llvm.mlir_undef(ir.VectorType.get((len(values),), values[0].type))
    for i, value in enumerate(values):
        result = llvm.insertelement(result, value, i32(i))
    return result


def elements(value: ir.Value) -> list[Number]:
    """Splits a vector into its elements."""
    return [Number(llvm.extractelement(value, i32(i))) for i in range(ir.VectorType(value.type).shape[0])]


def widen(values: Sequence[ir.Value]) -> list[Number]:
    """Converts to float32."""
    f32 = ir.F32Type.get()
    return [Number(value if value.type == f32 else arith.extf(f32, value)) for value in values]
