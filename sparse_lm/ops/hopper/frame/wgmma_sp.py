"""The sparse matrix instruction of Hopper, `wgmma.mma_async.sp`, for one warpgroup.

    accumulator[64, n] += values[64, 32] (2:4 of 64 columns) @ b[64, n]

takes two instructions m64nNk32 that share one metadata word a lane (formats.py has the layout). A
*step* does this for one or more blocks of 64 rows against the same b. The instructions read shared
memory, and their metadata register, *after* they are issued.

In e4m3 the same bytes are twice the columns: values [64, 64] of 128 columns, by two instructions m64nNk64, which have
a metadata word each, and take b only with the contracted dimension last. Of 64 columns, that word holds

    lane 32 * warp + 4 * g + t    row 16 * warp + g + 8 * (t % 2), logical k 32 * (t // 2) .. 32 * (t // 2) + 31

which are halves of the words that lanes t and t ^ 1 have in formats.py's layout: one load of both, and a permutation.

A step leaves its own instructions in flight and waits for those of the step before, so that the
tensor cores never idle between steps. Two hazards follow:

* The accumulators must stay in the registers that the instructions write, in the 32-bit layout
  `ACCUMULATOR`; any conversion inside the loop moves registers that are still being written.
* ptxas does not know that a metadata register is still being read, and reuses it for the next
  step's word. Steps therefore pass their words on: `step` takes the words of the step before and
  keeps them alive until it has loaded its own, and loops unroll two steps, so that two sets of
  registers take turns. Without this a third of the result is wrong.
"""

from __future__ import annotations

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from sparse_lm.ops.hopper.frame import emit
from sparse_lm.ops.hopper.frame.compat import ACCUMULATOR
from sparse_lm.ops.hopper.frame.emit import SCALAR, WARPGROUP_SIZE, Number
from sparse_lm.ops.hopper.frame.operands import swizzled

ROWS = 64  # of the sparse operand, per warpgroup
_VALUES_BYTES, _DENSE_BYTES = 64, 128  # of a row of either operand, per step
_INSTRUCTIONS = 2  # of a step
_PTX_TYPES = {"bf16": "bf16", "f16": "f16", "f8E4M3FN": "e4m3"}
_WORD = 4  # bytes of a metadata word


def step_columns(dtype: DTypeLike) -> int:
    """Counts the logical columns of the sparse operand that a step takes."""
    return _DENSE_BYTES // jnp.dtype(dtype).itemsize


def values_transforms(dtype: DTypeLike) -> tuple:
    """Returns the transforms of the sparse operand's values in shared memory."""
    return swizzled(dtype, _VALUES_BYTES)


def dense_transforms(dtype: DTypeLike) -> tuple:
    """Returns the transforms of the dense operand in shared memory."""
    return swizzled(dtype, _DENSE_BYTES)


# Of operands of 16 bits.
STEP = step_columns(jnp.bfloat16)
KEPT = STEP // 2
VALUES_TRANSFORMS, DENSE_TRANSFORMS = values_transforms(jnp.bfloat16), dense_transforms(jnp.bfloat16)


Words = tuple[Array, ...]
"""Metadata words of a lane, each an int32 scalar of `SCALAR`, whose lanes need not agree."""


def words_type(count: int) -> tuple[plgpu.ShapeDtypeStruct, ...]:
    """Returns the type of so many words."""
    return (plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR),) * count


Carry = tuple[tuple[Array, ...], Words]
"""Accumulators of every block of 64 rows, and the metadata words of the last step."""


def start(blocks: int, n: int, words: int = 1) -> Carry:
    """Returns the carry of `step` before the first step: accumulators [64, n] of zeros, so many words of each block."""
    zeros = plgpu.layout_cast(jnp.zeros((ROWS, n), jnp.float32), ACCUMULATOR)
    return (zeros,) * blocks, (jnp.int32(0),) * (blocks * words)


def load_words(metadata, _: None) -> tuple[Words, None]:
    """Loads this lane's metadata words of a step, from shared memory [blocks, 1, 128 * n] int32: n of each 64 rows.

    If n is 2, these are words of instructions in e4m3. It is a `load_words` of `persistent.accumulate`: nothing is read
    ahead, since a stage has the words of its step and no others.
    """
    blocks, _, width = metadata.shape
    words, of_e4m3 = blocks * width // WARPGROUP_SIZE, width > WARPGROUP_SIZE

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=words_type(words))
    def inline(_, metadata):
        lane = emit.thread_of_warpgroup()
        if of_e4m3:
            return tuple(map(splat, _load_words_of_e4m3(metadata, lane, words)))
        indices = [lane + WARPGROUP_SIZE * word for word in range(words)]
        return tuple(splat(load_word(metadata, index)) for index in indices)

    return inline(metadata), None


def step(carry: Carry, values, words: Words, b, *, b_transposed: bool) -> Carry:
    """Issues one step and waits for the one before: its shared memory may be overwritten afterwards.

    Args:
      carry: of `start` or of the step before.
      values: shared memory [64 * blocks, 32] with `values_transforms`; of e4m3 [64 * blocks, 64].
      words: of `load_words`, or others that are loaded as late: after the step before was issued.
      b: shared memory [64, n], or [n, 64] if `b_transposed`, with `dense_transforms`; of e4m3 [n, 128].

    Returns:
      The carry; its accumulators are still being written.
    """
    blocks, n = len(carry[0]), carry[0][0].shape[1]
    words_layout = (SCALAR,) * len(words)
    accumulators_type = (plgpu.ShapeDtypeStruct((ROWS, n), jnp.float32, layout=ACCUMULATOR),) * blocks

    @plgpu.inline_mgpu(
        arg_types=(
            ((ACCUMULATOR,) * blocks, words_layout),
            plgpu.RefType(values_transforms(values.dtype)),
            words_layout,
            plgpu.RefType(dense_transforms(b.dtype)),
        ),
        return_type=(accumulators_type, words_type(len(words))),
    )
    def inline(_, carry, values, words, b):
        accumulators, previous_words = carry
        if b_transposed:
            b = mgpu_utils.memref_transpose(b, (1, 0, 3, 2))
        words = list(map(emit.scalar, words))
        nvvm.wgmma_fence_aligned()
        per_block = len(words) // blocks
        results = tuple(
            _issue(accumulator, values, block, b, words[per_block * block : per_block * (block + 1)], n)
            for block, accumulator in enumerate(accumulators)
        )
        nvvm.wgmma_commit_group_sync_aligned()
        nvvm.wgmma_wait_group_sync_aligned(1)
        _use_together([*map(emit.scalar, previous_words), *words])
        return results, tuple(map(splat, words))

    return inline(carry, values, words, b)


def finish(carry: Carry) -> tuple[Array, ...]:
    """Waits for every step; the accumulators in the layout that conversions and stores know."""
    accumulators, _ = carry

    @plgpu.inline_mgpu(
        arg_types=((ACCUMULATOR,) * len(accumulators),),
        return_type=tuple(
            plgpu.ShapeDtypeStruct(a.shape, jnp.float32, layout=plgpu.Layout.WGMMA) for a in accumulators
        ),
    )
    def inline(_, accumulators):
        nvvm.wgmma_wait_group_sync_aligned(0)
        # Without the barrier the compiler may read a register ahead of the wait.
        settled = mgpu.fragmented_array.optimization_barrier(*accumulators)
        settled = settled if isinstance(settled, tuple | list) else (settled,)
        return tuple(a.to_layout(mgpu.WGMMA_LAYOUT) for a in settled)

    return inline(accumulators)


def _issue(
    accumulator: mgpu.FragmentedArray, values: ir.Value, block: int, b: ir.Value, words: list[Number], n: int
) -> mgpu.FragmentedArray:
    """Issues the two instructions of one block of rows, on the 64 * n / 128 accumulator registers of a lane."""
    element = ir.MemRefType(b.type).element_type
    columns = _DENSE_BYTES // mgpu_utils.bytewidth(element)
    # logical_k_major: whether the first dimension of the reference is k, of A [m, k] not, of B [k, n] so.
    (values_base, (_, (values_stride,))), (block_stride, _), _ = mma_utils.create_descriptor(
        values, swizzle=_VALUES_BYTES, group_size=(ROWS, columns // 2), logical_k_major=False
    )
    (b_base, (_, (b_stride,))), _, b_fastest = mma_utils.create_descriptor(
        b, swizzle=_DENSE_BYTES, group_size=(columns, n), logical_k_major=True
    )
    b_stride *= 2  # the descriptor is that of a dense instruction, which takes half as many rows of b
    count = n // 2
    float_register = ir.VectorType.get((1,), ir.F32Type.get())
    outputs = ", ".join(f"${i}" for i in range(count))
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["l", "l", "r"])
    dtype = _PTX_TYPES[str(element)]
    # Instructions that share a word read it of other pairs of lanes each (sp-sel), and may read transposed operands.
    shared_word = len(words) == 1
    transposed = f", 0, {int(b_fastest != mma_utils.Dim.K)}" if shared_word else ""

    flat = list(accumulator.registers.flat)
    for i in range(_INSTRUCTIONS):
        # After the metadata's word: which pairs of lanes hold it; scale-d; the signs of A and B; whether A and B are
        # transposed.
        code = (
            f"wgmma.mma_async.sp.sync.aligned.m64n{n}k{columns // 2}.f32.{dtype}.{dtype} {{{outputs}}}, "
            f"${2 * count}, ${2 * count + 1}, ${2 * count + 2}, {i if shared_word else 0}, 1, 1, 1{transposed};"
        )
        a_descriptor = _advance(values_base, block * block_stride + i * values_stride)
        operands = [*flat, a_descriptor, _advance(b_base, i * b_stride), words[0 if shared_word else i]]
        result = llvm.inline_asm(
            llvm.StructType.get_literal([float_register] * count),
            operands,
            code,
            constraints,
            asm_dialect=0,
            has_side_effects=True,
        )
        flat = [llvm.extractvalue(float_register, result, [j]) for j in range(count)]
    registers = np.empty(accumulator.registers.shape, dtype=object)
    registers.flat = flat
    return mgpu.FragmentedArray(_registers=registers, _layout=accumulator.layout, _is_signed=accumulator.is_signed)


def _advance(descriptor: ir.Value, byte_offset: int) -> ir.Value:
    offset = arith.constant(emit.i64_type(), mma_utils.encode_addr(byte_offset))
    return llvm.add(descriptor, offset, overflow_flags=llvm.IntegerOverflowFlags.none)


def load_word(metadata: ir.Value, index: Number) -> Number:
    """Loads a word of shared memory; volatile, so that it is loaded after the wait that frees its register."""
    pointer = emit.shared_memory(metadata).at(index)
    return emit.ptx("ld.volatile.shared.u32 $0, [$1];", "=r,l", [pointer], emit.i32_type())


def _load_words_of_e4m3(metadata: ir.Value, lane: Number, count: int) -> list[Number]:
    """Loads words as instructions in e4m3 want them, each from halves of a word and of its neighbour.

    As late as `load_word`; all from one address, since registers are scarce.
    """
    address = Number(llvm.ptrtoint(emit.i32_type(), emit.shared_memory(metadata).start)) + lane * _WORD
    code = [
        ".reg .pred even; .reg .b32 pair, halves, a, b;",
        f"and.b32 pair, ${count}, {_WORD}; setp.eq.u32 even, pair, 0; and.b32 pair, ${count}, {-2 * _WORD};",
        f"selp.b32 halves, {emit.LOW_HALVES}, {emit.HIGH_HALVES}, even;",
    ]
    for i in range(count):
        code.append(f"ld.volatile.shared.v2.u32 {{a, b}}, [pair + {_WORD * WARPGROUP_SIZE * i}];")
        code.append(f"prmt.b32 ${i}, a, b, halves;")
    result = llvm.StructType.get_literal([emit.i32_type()] * count)
    loaded = emit.ptx(f"{{ {' '.join(code)} }}", ",".join(["=&r"] * count + ["r"]), [address], result)
    return [Number(llvm.extractvalue(emit.i32_type(), loaded, [i])) for i in range(count)]


def _use_together(words: list[Number]) -> None:
    """Reads all the words, to no effect, so that no two share a register: no valid nibble is all ones."""
    ands = " ".join(f"and.b32 t, t, ${i};" for i in range(1, len(words)))
    code = f"{{ .reg .pred p; .reg .b32 t; mov.b32 t, $0; {ands} setp.eq.u32 p, t, -1; @p nanosleep.u32 0; }}"
    emit.ptx(code, ",".join("r" * len(words)), words)


def splat(number: Number) -> mgpu.FragmentedArray:
    """Makes an array of `SCALAR` of a lane's own 32-bit integer; its lanes need not agree."""
    return mgpu.FragmentedArray.splat(number, (), is_signed=True)
