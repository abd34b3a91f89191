"""Runs the MLIR of a pass's kernel in NumPy, so that a machine without a GPU sees its numbers.

A pass is one warpgroup a block and straight code between barriers: its 128 threads are run side by side, operation by
operation, and blocks one after the other. Memory is bytes; what lies outside of an array is refused, and so is an array
of results that is not written to its last byte. Nothing is known here of time, of races between threads, or of what the
GPU's compiler makes of the code.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import ml_dtypes
import numpy as np
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir

THREADS = 128
_DTYPES = {
    "i1": np.bool_, "i16": np.uint16, "i32": np.uint32, "i64": np.uint64, "index": np.uint64,
    "f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16,
}  # fmt: skip
_SIGNED = {np.uint16: np.int16, np.uint32: np.int32, np.uint64: np.int64}
# Operations that make a pointer, which is given, of a reference to memory.
_OF_REFERENCES = (
    "builtin.unrealized_conversion_cast", "llvm.extractvalue", "llvm.ptrtoint", "llvm.mul", "llvm.add", "llvm.inttoptr",
)  # fmt: skip
_DYNAMIC = -(2**31)  # an index of getelementptr that is an operand


def run(
    pass_: Callable[..., Any],
    operands: Sequence[Any],
    arrays: Sequence[Any],
    results: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[int],
    grid: tuple[int, ...],
    patch: Any,
) -> list[np.ndarray]:
    """Lowers `pass_(*operands)` for CUDA and runs its kernel.

    Args:
      pass_: calls one kernel, whose code is one `inline_mgpu`.
      operands: of the pass.
      arrays: in global memory, as the kernel reads them.
      results: shapes of what it writes; the arguments of its code are arrays, results, scratch and the block's place.
      scratch: bytes of each array in shared memory.
      grid: (rows, columns) of blocks.
      patch: pytest's monkeypatch.
    """
    rng = np.random.default_rng(0)
    sizes = [np.dtype(r.dtype).itemsize * int(np.prod(r.shape)) for r in results]
    memory = [np.frombuffer(np.asarray(a).tobytes(), np.uint8).copy() for a in arrays]
    memory += [rng.integers(0, 255, size, dtype=np.uint8) for size in (*sizes, *scratch)]
    written = [np.zeros(m.size, bool) for m in memory]
    pointers, ran, inline = [], [], plgpu.inline_mgpu

    def memref_ptr(ref, *args, original=mgpu_utils.memref_ptr, **options):
        pointers.append((original(ref, *args, **options), ref))
        return pointers[-1][0]

    def inline_mgpu(**options):
        def decorate(function):
            def emit(context, *args):
                pointers.clear()
                block = ir.InsertionPoint.current.block
                before = len(list(block.operations))
                function(context, *args)
                code = list(block.operations)[before:]
                refs = [a for a in args if isinstance(a, ir.Value)]
                scalars = [a.registers.item() for a in args if not isinstance(a, ir.Value)]
                assert len(refs) == len(memory)
                bases = [(pointer, refs.index(ref)) for pointer, ref in pointers]
                for place in itertools.product(*map(range, grid)):
                    threads = _Threads(memory, written, bases)
                    for scalar, index in zip(scalars, place, strict=True):
                        threads.values[scalar] = np.full(THREADS, index, np.uint32)
                    for op in code:
                        threads.run(op.operation)
                ran.append(code)

            return inline(**options)(emit)

        return decorate

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tuple(operands))
    with patch.context() as patched:
        patched.setattr(mgpu_utils, "memref_ptr", memref_ptr)
        patched.setattr(plgpu, "inline_mgpu", inline_mgpu)
        jax.jit(lambda *args: pass_(*args)).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert len(ran) == 1 and len(ran[0]) > 100
    found = slice(len(arrays), len(arrays) + len(results))
    assert all(w.all() for w in written[found])
    return [m.view(np.dtype(r.dtype)).reshape(r.shape) for m, r in zip(memory[found], results, strict=True)]


class _Threads:
    """The values of all threads of a block, each an array [THREADS] or, of a vector, [THREADS, lanes]."""

    def __init__(self, memory: list[np.ndarray], written: list[np.ndarray], bases: list[tuple[ir.Value, int]]):
        self.memory, self.written = memory, written
        self.values: dict[ir.Value, Any] = {p: (number, np.zeros(THREADS, np.int64)) for p, number in bases}

    def run(self, op: ir.Operation) -> None:
        if list(op.results) and op.results[0] in self.values:
            return  # a pointer to memory that has been given
        name, operands = op.name, list(op.operands)
        if name == "llvm.store":
            self._store(self.get(operands[0]), *self.get(operands[1]))
        elif name == "llvm.load":
            self.values[op.results[0]] = self._load(op.results[0].type, *self.get(operands[0]))
        elif name == "llvm.inline_asm" and "bar.sync" in str(op.attributes["asm_string"]):
            pass  # threads are side by side at every operation
        elif name not in _OF_REFERENCES:
            compute = _OPERATIONS[name]
            with np.errstate(all="ignore"):
                self.values[op.results[0]] = compute(op, *map(self.get, operands))

    def get(self, value: ir.Value) -> Any:
        if value not in self.values:
            self.run(value.owner)  # a constant from outside of the code
        return self.values[value]

    def _load(self, kind: ir.Type, array: int, start: np.ndarray) -> np.ndarray:
        dtype, lanes = _dtype(kind)
        found = np.ascontiguousarray(self.memory[array][self._bytes(array, start, dtype, lanes)]).view(dtype)
        return found if lanes else found[:, 0]

    def _store(self, value: np.ndarray, array: int, start: np.ndarray) -> None:
        data = np.ascontiguousarray(value).reshape(THREADS, -1)
        where = self._bytes(array, start, data.dtype, data.shape[1])
        self.memory[array][where], self.written[array][where] = data.view(np.uint8), True

    def _bytes(self, array: int, start: np.ndarray, dtype: Any, lanes: int | None) -> np.ndarray:
        where = start[:, None] + np.arange(np.dtype(dtype).itemsize * (lanes or 1))
        assert where.min() >= 0 and where.max() < self.memory[array].size
        return where


def _dtype(kind: ir.Type) -> tuple[Any, int | None]:
    text = str(kind)
    if text.startswith("vector<"):
        lanes, element = text[len("vector<") : -1].split("x")
        return _DTYPES[element], int(lanes)
    return _DTYPES[text], None


def _constant(op: ir.Operation) -> np.ndarray:
    dtype, number = _DTYPES[str(op.results[0].type)], op.attributes["value"].value
    if np.issubdtype(dtype, np.unsignedinteger):
        number %= 1 << 8 * np.dtype(dtype).itemsize
    return np.full(THREADS, number, dtype)


def _of_same_dtype(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda op, *args: function(*args).astype(args[-1].dtype)


def _convert(op: ir.Operation, x: np.ndarray) -> np.ndarray:
    return x.astype(_dtype(op.results[0].type)[0])


def _bitcast(op: ir.Operation, x: np.ndarray) -> np.ndarray:
    dtype, lanes = _dtype(op.results[0].type)
    seen = np.ascontiguousarray(x).reshape(THREADS, -1).view(dtype)
    return seen if lanes else seen[:, 0]


def _compare(op: ir.Operation, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    predicate = ir.IntegerAttr(op.attributes["predicate"]).value
    if op.name == "arith.cmpf":  # the ordered ones
        names = {1: "eq", 2: "gt", 3: "ge", 4: "lt", 5: "le"}
        return getattr(operator, names[predicate])(a, b)
    if 2 <= predicate <= 5:
        a, b = (x.view(_SIGNED[x.dtype.type]) for x in (a, b))
    return getattr(operator, ("eq", "ne", "lt", "le", "gt", "ge", "lt", "le", "gt", "ge")[predicate])(a, b)


def _element_pointer(op: ir.Operation, base: tuple[int, np.ndarray], *index: np.ndarray) -> tuple[int, np.ndarray]:
    (dtype, lanes), (raw,) = _dtype(ir.TypeAttr(op.attributes["elem_type"]).value), op.attributes["rawConstantIndices"]
    number = index[0].view(_SIGNED[index[0].dtype.type]).astype(np.int64) if raw == _DYNAMIC else raw
    return base[0], base[1] + number * np.dtype(dtype).itemsize * (lanes or 1)


def _insert(op: ir.Operation, vector: np.ndarray, x: np.ndarray, lane: np.ndarray) -> np.ndarray:
    vector = vector.copy()
    vector[:, int(lane[0])] = x
    return vector


def _undefined(op: ir.Operation) -> np.ndarray:
    dtype, lanes = _dtype(op.results[0].type)
    return np.zeros((THREADS, lanes), dtype)


def _thread_number(op: ir.Operation) -> np.ndarray:
    along_x = str(op.attributes["dimension"]).endswith("x>")
    values = np.arange(THREADS) if op.name == "gpu.thread_id" else np.full(THREADS, THREADS)
    return (values if along_x else np.full(THREADS, op.name == "gpu.block_dim")).astype(np.uint64)


def _funnel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.uint64) << np.uint64(32) | b


def _permute(op: ir.Operation, *args: np.ndarray) -> np.ndarray:
    low, high, selector = args
    given = np.concatenate([np.ascontiguousarray(x).view(np.uint8).reshape(THREADS, 4) for x in (low, high)], axis=1)
    chosen = [given[np.arange(THREADS), selector >> 4 * i & 7] for i in range(4)]
    return np.ascontiguousarray(np.stack(chosen, axis=1)).view(np.uint32)[:, 0]


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) * b + c


_BINARY = {
    "addi": np.add, "subi": np.subtract, "muli": np.multiply, "divui": np.floor_divide, "remui": np.remainder,
    "andi": np.bitwise_and, "ori": np.bitwise_or, "xori": np.bitwise_xor, "shli": np.left_shift,
    "shrui": np.right_shift, "maxui": np.maximum, "minui": np.minimum, "addf": np.add, "subf": np.subtract,
    "mulf": np.multiply, "maximumf": np.maximum, "minimumf": np.minimum,
}  # fmt: skip
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{f"arith.{name}": _of_same_dtype(function) for name, function in _BINARY.items()},
    **dict.fromkeys([f"arith.{name}" for name in ("extui", "trunci", "extf", "truncf", "uitofp")], _convert),
    **dict.fromkeys(["arith.index_cast", "arith.index_castui"], _convert),
    **dict.fromkeys(["arith.bitcast", "llvm.bitcast"], _bitcast),
    **dict.fromkeys(["arith.cmpi", "arith.cmpf"], _compare),
    **dict.fromkeys(["gpu.thread_id", "gpu.block_dim"], _thread_number),
    **dict.fromkeys(["llvm.inline_asm", "nvvm.prmt"], _permute),
    "arith.constant": _constant,
    "arith.select": lambda op, c, a, b: np.where(c, a, b),
    "math.absf": lambda op, x: np.abs(x),
    "math.sqrt": lambda op, x: np.sqrt(x),
    "math.fma": _of_same_dtype(_fma),
    "math.ctpop": lambda op, x: np.bitwise_count(x).astype(x.dtype),
    "llvm.addrspacecast": lambda op, pointer: pointer,
    "llvm.getelementptr": _element_pointer,
    "llvm.mlir.undef": _undefined,
    "llvm.insertelement": _insert,
    "llvm.extractelement": lambda op, vector, lane: vector[:, int(lane[0])].copy(),
    "llvm.intr.fshl": lambda op, a, b, n: (_funnel(a, b) << n.astype(np.uint64) >> np.uint64(32)).astype(np.uint32),
    "llvm.intr.fshr": lambda op, a, b, n: (_funnel(a, b) >> n.astype(np.uint64)).astype(np.uint32),
    "nvvm.shfl.sync": lambda op, mask, x, distance, clamp: x[np.arange(THREADS) ^ int(distance[0])],
}
