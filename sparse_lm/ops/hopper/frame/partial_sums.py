"""One tile's sum of what several clusters of a persistent grid compute, each some of the steps along k.

All but the cluster with the tile's first steps leave their accumulators in a workspace in global
memory and signal; that one waits for each in turn, adds it up, and stores the tile. The sum is the
same in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from sparse_lm.ops.hopper.frame.emit import WARPGROUP_SIZE, global_pointer, i32, ptx


def contribute(accumulators: tuple[Array, ...], workspace: Any, semaphore: Any) -> None:
    """Leaves a warpgroup's accumulators [64, n] in `workspace` [blocks, 64 * n] float32, and signals."""
    for block, accumulator in enumerate(accumulators):
        _write(accumulator, workspace.at[block])
    pl.semaphore_signal(semaphore, 1)


def wait(parts: Array, semaphore: Callable[[Array], Any]) -> None:
    """Waits until contributions 1 to `parts` are there; `semaphore(part)` is the contributing warpgroup's."""

    @pl.loop(1, parts + 1)
    def _part(part):
        pl.semaphore_wait(semaphore(part), 1)


def collect(tile: Array, parts: Array, contribution: Callable[[Array], Any]) -> Array:
    """Adds contributions 1 to `parts`, in this order, to some columns of the accumulators.

    Args:
      tile: [64, columns] float32 in layout WGMMA. Few columns at a time leave registers to load more of them at once.
      parts: how many contributions there are.
      contribution: from a part, where those columns of it are, [64 * columns].
    """
    return lax.fori_loop(1, parts + 1, lambda part, tile: _add(tile, contribution(part)), tile)


def _write(accumulator: Array, workspace: Any) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def emit(_, accumulator, workspace):
        for register, pointer in zip(accumulator.registers.flat, _pointers(accumulator, workspace), strict=True):
            llvm.store(register, pointer, alignment=8)
        mgpu_utils.warpgroup_barrier()  # one thread signals for all

    emit(accumulator, workspace)


def _add(accumulator: Array, workspace: Any) -> Array:
    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(accumulator.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def emit(_, accumulator, workspace):
        registers = accumulator.registers
        loaded = [_load_pair(pointer) for pointer in _pointers(accumulator, workspace)]
        out = np.empty(registers.shape, dtype=object)
        out.flat = [arith.addf(*pair) for pair in zip(registers.flat, loaded, strict=True)]
        return mgpu.FragmentedArray(_registers=out, _layout=accumulator.layout, _is_signed=None)

    return emit(accumulator, workspace)


def _load_pair(pointer: ir.Value) -> ir.Value:
    """Loads a pair of floats; volatile, since another cluster wrote them."""
    f32 = ir.F32Type.get()
    struct = llvm.StructType.get_literal([f32, f32])
    loaded = ptx("ld.volatile.global.v2.f32 {$0, $1}, [$2];", "=f,=f,l", [pointer], struct)
    pair = llvm.mlir_undef(ir.VectorType.get((2,), f32))
    for i in range(2):
        pair = llvm.insertelement(pair, llvm.extractvalue(f32, loaded, [i]), i32(i))
    return pair


def _pointers(accumulator: mgpu.FragmentedArray, workspace: ir.Value) -> list[ir.Value]:
    """Computes where each register of this thread, a pair of floats, goes: neighbouring threads next to each other."""
    thread = arith.remui(mgpu_utils.thread_idx(), i32(WARPGROUP_SIZE))
    base = global_pointer(workspace)
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    return [
        mgpu_utils.getelementptr(base, [arith.addi(thread, i32(WARPGROUP_SIZE * i))], pair)
        for i in range(accumulator.registers.size)
    ]
