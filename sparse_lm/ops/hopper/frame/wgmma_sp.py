"""The sparse matrix instruction of Hopper, `wgmma.mma_async.sp`, for one warpgroup.

    accumulator[64, n] += values[64, 32] (2:4 of 64 columns) @ b[64, n]

takes two instructions m64nNk32 that share one metadata word a lane (formats.py has the layout). A
*step* does this for one or more blocks of 64 rows against the same b. The instructions read shared
memory, and their metadata register, *after* they are issued.

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
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from sparse_lm.ops.hopper.frame.compat import ACCUMULATOR
from sparse_lm.ops.hopper.frame.emit import SCALAR, WARPGROUP_SIZE, i32, i32_type, i64, ptx

ROWS = 64  # of the sparse operand, per warpgroup
STEP = 64  # logical columns of the sparse operand, per step
KEPT = STEP // 2

VALUES_TRANSFORMS = (plgpu.TilingTransform((8, KEPT)), plgpu.SwizzleTransform(2 * KEPT))
DENSE_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

_INSTRUCTIONS = 2  # of a step, for 32 logical columns each


Words = tuple[Array, ...]
"""Metadata words of a lane, each an int32 scalar of `SCALAR`, whose lanes need not agree."""

Carry = tuple[tuple[Array, ...], Words]
"""Accumulators, and the metadata words of the last step, one of each for every block of 64 rows."""


def start(blocks: int, n: int) -> Carry:
    """Returns the carry of `step` before the first step: accumulators [64, n] of zeros."""
    zeros = plgpu.layout_cast(jnp.zeros((ROWS, n), jnp.float32), ACCUMULATOR)
    return (zeros,) * blocks, (jnp.int32(0),) * blocks


def load_words(metadata) -> Words:
    """Loads this lane's metadata words of a step, from shared memory [blocks, 1, 128] int32: one of each 64 rows."""
    blocks = metadata.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=(plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR),) * blocks,
    )
    def emit(_, metadata):
        lane = arith.remui(mgpu_utils.thread_idx(), i32(WARPGROUP_SIZE))
        indices = [arith.addi(lane, i32(WARPGROUP_SIZE * block)) for block in range(blocks)]
        return tuple(splat(load_word(metadata, index)) for index in indices)

    return emit(metadata)


def step(carry: Carry, values, words: Words, b, *, b_transposed: bool) -> Carry:
    """Issues one step and waits for the one before: its shared memory may be overwritten afterwards.

    Args:
      carry: of `start` or of the step before.
      values: shared memory [64 * blocks, 32] with `VALUES_TRANSFORMS`.
      words: of `load_words`, or others that are loaded as late: after the step before was issued.
      b: shared memory [64, n], or [n, 64] if `b_transposed`, with `DENSE_TRANSFORMS`.
      b_transposed: whether b is stored with the contracted dimension last.

    Returns:
      The carry; its accumulators are still being written.
    """
    blocks, n = len(carry[0]), carry[0][0].shape[1]
    words_layout = (SCALAR,) * blocks
    carry_type = (
        (plgpu.ShapeDtypeStruct((ROWS, n), jnp.float32, layout=ACCUMULATOR),) * blocks,
        (plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR),) * blocks,
    )

    @plgpu.inline_mgpu(
        arg_types=(
            ((ACCUMULATOR,) * blocks, words_layout),
            plgpu.RefType(VALUES_TRANSFORMS),
            words_layout,
            plgpu.RefType(DENSE_TRANSFORMS),
        ),
        return_type=carry_type,
    )
    def emit(_, carry, values, words, b):
        accumulators, previous_words = carry
        if b_transposed:
            b = mgpu_utils.memref_transpose(b, (1, 0, 3, 2))
        words = [word.registers.item() for word in words]
        nvvm.wgmma_fence_aligned()
        results = [
            _issue(accumulator.registers, values, block, b, word, n)
            for block, (accumulator, word) in enumerate(zip(accumulators, words, strict=True))
        ]
        nvvm.wgmma_commit_group_sync_aligned()
        nvvm.wgmma_wait_group_sync_aligned(1)
        _use_together([word.registers.item() for word in previous_words] + words)
        return tuple(map(_with_registers, accumulators, results)), tuple(map(splat, words))

    return emit(carry, values, words, b)


def finish(carry: Carry) -> tuple[Array, ...]:
    """Waits for every step; the accumulators in the layout that conversions and stores know."""
    accumulators, _ = carry

    @plgpu.inline_mgpu(
        arg_types=((ACCUMULATOR,) * len(accumulators),),
        return_type=tuple(
            plgpu.ShapeDtypeStruct(a.shape, jnp.float32, layout=plgpu.Layout.WGMMA) for a in accumulators
        ),
    )
    def emit(_, accumulators):
        nvvm.wgmma_wait_group_sync_aligned(0)
        # Without the barrier the compiler may read a register ahead of the wait.
        settled = mgpu.fragmented_array.optimization_barrier(*accumulators)
        settled = settled if isinstance(settled, tuple | list) else (settled,)
        return tuple(a.to_layout(mgpu.WGMMA_LAYOUT) for a in settled)

    return emit(accumulators)


def _issue(registers: np.ndarray, values: ir.Value, block: int, b: ir.Value, word: ir.Value, n: int) -> np.ndarray:
    """Issues the two instructions of one block of rows, on the 64 * n / 128 accumulator registers of a lane."""
    # logical_k_major: whether the first dimension of the reference is k, of A [m, k] not, of B [k, n] so.
    (values_base, (_, (values_stride,))), (block_stride, _), _ = mma_utils.create_descriptor(
        values, swizzle=2 * KEPT, group_size=(ROWS, KEPT), logical_k_major=False
    )
    (b_base, (_, (b_stride,))), _, b_fastest = mma_utils.create_descriptor(
        b, swizzle=128, group_size=(STEP, n), logical_k_major=True
    )
    b_stride *= 2  # the descriptor is that of a dense instruction, which takes 16 rows of b, not 32
    count = n // 2
    float_register = ir.VectorType.get((1,), ir.F32Type.get())
    outputs = ", ".join(f"${i}" for i in range(count))
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["l", "l", "r"])
    dtype = ir.MemRefType(b.type).element_type  # bf16 and f16 are called the same in PTX
    b_columns_fastest = int(b_fastest != mma_utils.Dim.K)

    flat = list(registers.flat)
    for i in range(_INSTRUCTIONS):
        # After the metadata's word: which pairs of lanes hold it (sp-sel); scale-d; the signs of A and B; whether A
        # and B are transposed.
        code = (
            f"wgmma.mma_async.sp.sync.aligned.m64n{n}k32.f32.{dtype}.{dtype} {{{outputs}}}, "
            f"${2 * count}, ${2 * count + 1}, ${2 * count + 2}, {i}, 1, 1, 1, 0, {b_columns_fastest};"
        )
        a_descriptor = _advance(values_base, block * block_stride + i * values_stride)
        operands = [*flat, a_descriptor, _advance(b_base, i * b_stride), word]
        result = llvm.inline_asm(
            llvm.StructType.get_literal([float_register] * count),
            operands,
            code,
            constraints,
            asm_dialect=0,
            has_side_effects=True,
        )
        flat = [llvm.extractvalue(float_register, result, [j]) for j in range(count)]
    out = np.empty(registers.shape, dtype=object)
    out.flat = flat
    return out


def _advance(descriptor: ir.Value, byte_offset: int) -> ir.Value:
    offset = i64(mma_utils.encode_addr(byte_offset))
    return llvm.add(descriptor, offset, overflow_flags=llvm.IntegerOverflowFlags.none)


def load_word(metadata: ir.Value, index: ir.Value) -> ir.Value:
    """Loads a word of shared memory; volatile, so that it is loaded after the wait that frees its register."""
    address = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(metadata), [index], i32_type())
    return ptx("ld.volatile.shared.u32 $0, [$1];", "=r,l", [address], i32_type())


def _use_together(words: list[ir.Value]) -> None:
    """Reads all the words, to no effect, so that no two share a register: no valid nibble is all ones."""
    ands = " ".join(f"and.b32 t, t, ${i};" for i in range(1, len(words)))
    code = f"{{ .reg .pred p; .reg .b32 t; mov.b32 t, $0; {ands} setp.eq.u32 p, t, -1; @p nanosleep.u32 0; }}"
    ptx(code, ",".join("r" * len(words)), words)


def _with_registers(array: mgpu.FragmentedArray, registers: np.ndarray) -> mgpu.FragmentedArray:
    return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=array.is_signed)


def splat(scalar: ir.Value) -> mgpu.FragmentedArray:
    """Makes an array of `SCALAR` of a lane's own 32-bit integer; its lanes need not agree."""
    registers = np.array(scalar, dtype=object)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGSplatFragLayout(()), _is_signed=True)
