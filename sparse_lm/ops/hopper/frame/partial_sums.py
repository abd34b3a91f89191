"""Sums up a tile that several clusters of a persistent grid compute, each some of the steps along k.

All but the cluster with the tile's first steps leave their accumulators in a workspace in global
memory and signal; that one waits for each in turn, adds it up, and stores the tile. The sum is the
same in every run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from sparse_lm.ops.hopper.frame import emit
from sparse_lm.ops.hopper.frame.emit import SCALAR, WARPGROUP_SIZE
from sparse_lm.ops.hopper.frame.schedule import Grid
from sparse_lm.ops.hopper.frame.wgmma_sp import splat


class Sums(NamedTuple):
    """The parts that clusters leave for one another, as one warpgroup sees them."""

    grid: Grid
    workspace: Any  # float32 [contributors, blocks of a cluster, consumers, blocks of 64 rows, 64 * n]
    semaphores: Any  # [contributors, blocks of a cluster, consumers]
    cluster: Array  # this warpgroup's place
    peer: Array
    warpgroup: Array

    def contribute(self, accumulators: tuple[Array, ...]) -> None:
        """Leaves this warpgroup's accumulators [64, n], and signals."""
        workspace, semaphore = self._of(self.workspace, 0), self._of(self.semaphores, 0)

        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
        def write(_, accumulator, workspace):
            for register, pointer in zip(accumulator.registers.flat, _pointers(accumulator, workspace), strict=True):
                llvm.store(register, pointer, alignment=8)
            mgpu_utils.warpgroup_barrier()  # one thread signals for all

        for block, accumulator in enumerate(accumulators):
            write(accumulator, workspace.at[block])
        pl.semaphore_signal(semaphore, 1)

    def wait(self, parts: Array) -> None:
        """Waits until contributions 1 to `parts` are there."""

        @pl.loop(1, parts + 1)
        def _part(part):
            pl.semaphore_wait(self._of(self.semaphores, part), 1)

    def collect(self, tile: Array, parts: Array, where: tuple) -> Array:
        """Adds contributions 1 to `parts`, in this order, to some columns of the accumulators.

        These columns, [64, columns] float32 in layout WGMMA, are at `where` of a contribution. Few at a time leave
        registers to load more of them at once.
        """

        @plgpu.inline_mgpu(
            arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()),
            return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
        )
        def add(_, tile, contribution):
            loaded = [_load_pair(pointer) for pointer in _pointers(tile, contribution)]
            out = np.empty(tile.registers.shape, dtype=object)
            out.flat = [arith.addf(*pair) for pair in zip(tile.registers.flat, loaded, strict=True)]
            return mgpu.FragmentedArray(_registers=out, _layout=tile.layout, _is_signed=None)

        def add_part(part, tile):
            return add(tile, self._of(self.workspace, part).at[where])

        return lax.fori_loop(1, parts + 1, add_part, tile)

    def _of(self, ref: Any, part: Array | int) -> Any:
        """Returns this warpgroup's entry of the cluster that has a part of the tile; part 0 is this cluster's."""
        contributor = opaque(self.cluster) - part * self.grid.contributor_stride
        return ref.at[contributor, self.peer, self.warpgroup]


def opaque(number: Array) -> Array:
    """Hides a number from the compiler, so that what depends on it is not kept in registers that accumulators need."""

    @plgpu.inline_mgpu(arg_types=(SCALAR,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def inline(_, number):
        return splat(emit.ptx("mov.b32 $0, $1;", "=r,r", [emit.scalar(number)], emit.i32_type()))

    return inline(number)


def _load_pair(pointer: ir.Value) -> ir.Value:
    """Loads a pair of floats; volatile, since another cluster wrote them."""
    f32 = ir.F32Type.get()
    struct = llvm.StructType.get_literal([f32, f32])
    loaded = emit.ptx("ld.volatile.global.v2.f32 {$0, $1}, [$2];", "=f,=f,l", [pointer], struct)
    pair = llvm.mlir_undef(ir.VectorType.get((2,), f32))
    for i in range(2):
        pair = llvm.insertelement(pair, llvm.extractvalue(f32, loaded, [i]), emit.i32(i))
    return pair


def _pointers(accumulator: mgpu.FragmentedArray, workspace: ir.Value) -> list[ir.Value]:
    """Computes where each register of this thread, a pair of floats, goes: neighbouring threads next to each other."""
    thread = emit.thread_of_warpgroup()
    pairs = emit.global_memory(workspace, ir.VectorType.get((2,), ir.F32Type.get()))
    return [pairs.at(thread + WARPGROUP_SIZE * i) for i in range(accumulator.registers.size)]
