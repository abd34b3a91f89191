"""A ring of shared-memory stages between one producer warpgroup, whose TMA copies fill them, and its consumers.

Pallas' own barriers are arrived at by all 128 threads of a warpgroup, once a copy. The `full` barriers
here take one arrival a stage, of one thread, for all TMA copies together; and, if the producer also
*gathers* rows with `cp.async`, one of each of its threads, when that thread's copies have landed.
Step s uses stage s % stages for the (s // stages)-th time; both sides count steps, so the barriers'
parities need no state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, nvvm

from sparse_lm.ops.hopper.frame.emit import SCALAR, WARPGROUP_SIZE, Number, element_of, i32, ptx, scalar, shape_of

CLUSTER_AXIS = "peer"  # thread blocks that share what is multicast


def barriers(stages: int, consumers: int) -> tuple[Any, Any]:
    """Allocates `Ring.full`, and `Ring.empty`, at which each consumer of every block of the cluster arrives once."""
    full = plgpu.SMEM((stages, 2), jnp.int32)  # an mbarrier is 8 bytes
    empty = plgpu.ClusterBarrier(collective_axes=(CLUSTER_AXIS,), num_arrivals=consumers, num_barriers=stages)
    return full, empty


@dataclasses.dataclass(frozen=True)
class Copy:
    """A tile to bring in."""

    source: Any  # global memory
    target: Any  # shared memory, of the tile's shape
    origin: tuple[Array, ...]  # where the tile starts in the source; out of bounds reads give zeros
    transforms: tuple  # tiling and swizzle of the target, if any
    multicast: bool  # whether the blocks of the cluster want the same tile; each then reads a part of it


@dataclasses.dataclass(frozen=True)
class Ring:
    """The barriers of all stages, see the module docstring."""

    full: Any
    empty: Any
    stages: int
    gathers: bool  # whether the producer calls `arrive_gathered`

    def slot(self, step: Array) -> Array:
        """Returns the stage that a step uses."""
        return lax.rem(step, self.stages)

    def initialize(self) -> None:
        """Must run in every thread of the cluster before any other use."""
        arrivals = 1 + (WARPGROUP_SIZE if self.gathers else 0)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def inline(_, full):
            first_thread = mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.BLOCK)
            for stage in range(self.stages):
                address = _barrier(full, i32(stage)).get_ptr()
                nvvm.mbarrier_init(address, i32(arrivals), predicate=first_thread)
            ptx("fence.mbarrier_init.release.cluster;", "", [])
            nvvm.cluster_arrive(aligned=ir.UnitAttr.get())
            nvvm.cluster_wait(aligned=ir.UnitAttr.get())

        inline(self.full)

    def fill(self, step: Array, copies: Sequence[Copy]) -> None:
        """Waits, as the producer, until the consumers have left the stage, then starts the copies into it."""

        @pl.when(step >= self.stages)
        def _wait():
            plgpu.barrier_wait(self.empty.at[self.slot(step)])

        tiles = [(copy.source, copy.target, copy.origin) for copy in copies]
        types = [(plgpu.RefType(), plgpu.RefType(copy.transforms), (SCALAR,) * len(copy.origin)) for copy in copies]

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, types))
        def inline(ctx, full, slot, tiles):
            # All warps are past the wait above before a thread refills the slot. Else its consumers might complete the
            # next phase of `empty`, too, and a slower warp, which knows a phase by its parity only, would wait forever.
            mgpu_utils.warpgroup_barrier()
            barrier = _barrier(full, scalar(slot))
            one_thread = mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARPGROUP)
            sizes = (math.prod(shape_of(target)) * mgpu_utils.bytewidth(element_of(target)) for _, target, _ in tiles)
            barrier.arrive_expect_tx(sum(sizes), one_thread)
            for copy, tile in zip(copies, tiles, strict=True):
                _start_copy(ctx, copy, *tile, barrier, one_thread)

        inline(self.full, self.slot(step), tiles)

    def arrive_gathered(self, step: Array) -> None:
        """Arrives, as the producer, once the `cp.async` copies that each thread has issued so far have landed."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
        def inline(_, full, slot):
            address = _barrier(full, scalar(slot)).get_ptr()
            ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "l", [address])

        inline(self.full, self.slot(step))

    def wait_full(self, step: Array) -> Array:
        """Waits, as a consumer, until the stage of `step` has been filled for it; returns its slot."""
        parity = lax.rem(lax.div(step, self.stages), 2)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
        def inline(_, full, slot, parity):
            parity = arith.trunci(ir.IntegerType.get_signless(1), scalar(parity))
            _barrier(full, scalar(slot)).wait_parity(parity)
            if self.gathers:  # wgmma reads through another proxy than cp.async writes
                ptx("fence.proxy.async.shared::cta;", "", [])

        inline(self.full, self.slot(step), parity)
        return self.slot(step)

    def release(self, step: Array) -> None:
        """Tells the producer that this consumer warpgroup reads the stage of `step` no more."""
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def close(self, steps: Array) -> None:
        """Waits, as the producer after all its steps, for the cluster's consumers, which signal into this block."""

        @pl.loop(0, self.stages)
        def _stage(i):
            @pl.when(steps + i >= self.stages)
            def _wait():
                plgpu.barrier_wait(self.empty.at[self.slot(steps + i)])


def _start_copy(ctx, copy, source, target, origin, barrier, one_thread) -> None:
    shape, tiling = shape_of(target), {}
    if copy.transforms:
        tile, swizzle = copy.transforms
        tiling = dict(gmem_transform=(mgpu.TileTransform(tile.tiling),), swizzle=swizzle.swizzle)
        shape = shape[0] * shape[2], shape[1] * shape[3]
    ctx.async_copy(
        src_ref=source,
        dst_ref=target,
        gmem_slice=tuple(
            mgpu.DynamicSlice(arith.index_cast(ir.IndexType.get(), scalar(start)), extent)
            for start, extent in zip(origin, shape, strict=True)
        ),
        barrier=barrier,
        arrive=False,
        collective=(gpu.Dimension.x,) if copy.multicast else None,
        predicate=one_thread,
        **tiling,
    )


def _barrier(full: ir.Value, slot: Number) -> mgpu.BarrierRef:
    """Refers to the barrier of a slot without a phase: whoever waits says which parity for."""
    return mgpu.BarrierRef(mgpu_utils.memref_ptr(full), slot, None, 1)
