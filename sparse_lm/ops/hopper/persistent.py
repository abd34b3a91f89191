"""The frame of the products with a 2:4 operand: a persistent grid of warp-specialized thread blocks.

In each block one producer warpgroup keeps a ring of shared-memory stages full, with TMA copies and
gathers, and two consumer warpgroups each hold the accumulators of half the tile. The blocks of a cluster
share one operand's tile (multicast), and so do the same steps at the same time. What is computed where
is a kernel's `Jobs` (schedule.py), what is copied its `Loads`.

What limits the products is shared memory: an instruction m64nNk32 reads 2 + N / 16 KB in N / 2 cycles, at
most 128 bytes each, and the copies write on top of that. So a tile is as large as registers allow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from sparse_lm.ops.hopper import partial_sums, wgmma_sp
from sparse_lm.ops.hopper.emit import COMPILER_PARAMS, SCALAR, i32_type, ptx
from sparse_lm.ops.hopper.mainloop import accumulate
from sparse_lm.ops.hopper.ring import CLUSTER_AXIS, Copy, Ring, empty_barriers, full_barriers
from sparse_lm.ops.hopper.schedule import Grid, Job, Jobs
from sparse_lm.ops.hopper.store import staging, store_tile, stores

CONSUMERS = 2
STEP = wgmma_sp.STEP

_PRODUCER = CONSUMERS  # index of its warpgroup
_FEW_ACCUMULATORS = 128  # of a consumer's thread: what leaves registers to the producer
_LOOK_AHEAD = 4  # steps: a number from the L2 cache takes longer than one


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Of a product with a 2:4 operand of its rows.

    Attributes:
      tile_m: rows of a block's tile, 128 or 256: one or two blocks of 64 rows for each consumer; or 64, of
        which each consumer computes half of the columns.
      tile_n: columns of a block's tile, a multiple of 64, at most 256. A consumer thread holds
        tile_m * tile_n / 256 accumulators, of its 240 registers.
      stages: of the ring, each of 64 logical columns of the sparse operand.
      cluster: blocks that share an operand's tile.
      share_b: whether the blocks of a cluster compute tiles under one another, and so share that of the dense
        operand; else tiles side by side, and share that of the sparse one.
      store_slots: output tiles of 64 rows in shared memory, per consumer.
    """

    tile_m: int
    tile_n: int
    stages: int = 4
    cluster: int = 2
    share_b: bool = True
    store_slots: int = 2

    @property
    def consumer_tile(self) -> tuple[int, int]:
        """Rows and columns of the part of a tile that a consumer computes."""
        if self.tile_m == wgmma_sp.ROWS:
            return self.tile_m, self.tile_n // CONSUMERS
        return self.tile_m // CONSUMERS, self.tile_n

    @property
    def cluster_m(self) -> int:
        """Rows of a cluster's tiles."""
        return self.tile_m * (self.cluster if self.share_b else 1)

    @property
    def cluster_n(self) -> int:
        """Columns of a cluster's tiles."""
        return self.tile_n * (1 if self.share_b else self.cluster)

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """How many clusters' tiles cover m rows, and n columns."""
        return pl.cdiv(m, self.cluster_m), pl.cdiv(n, self.cluster_n)

    def origin(self, row: Array, column: Array, peer: Array) -> tuple[Array, Array]:
        """First row and column of a block's tile, where the cluster's is number (row, column) of the grid."""
        row_in_cluster, column_in_cluster = (peer, 0) if self.share_b else (0, peer)
        return (
            row * self.cluster_m + row_in_cluster * self.tile_m,
            column * self.cluster_n + column_in_cluster * self.tile_n,
        )


@dataclasses.dataclass(frozen=True)
class Stage:
    """Of the ring, in shared memory: values [tile_m, 32], metadata [tile_m / 64, 1, 128], b [64, tile_n] or turned."""

    values: Any
    metadata: Any
    b: Any
    tiling: Tiling

    def copy_sparse(
        self, values: Any, metadata: Any, row: Array, k: Array, *, first: int = 0, rows: int | None = None
    ) -> list[Copy]:
        """`rows` rows (all by default) from `row` of the sparse operand on, to the stage's from `first` on; k in steps.

        Rows are counted in multiples of 64.
        """
        rows = rows or self.tiling.tile_m
        first_tile, tiles = first // wgmma_sp.ROWS, rows // wgmma_sp.ROWS
        multicast = self.tiling.cluster > 1 and not self.tiling.share_b
        values_origin = row, k * wgmma_sp.KEPT
        metadata_origin = lax.div(row, wgmma_sp.ROWS), k, jnp.int32(0)
        return [
            Copy(values, self.values.at[pl.ds(first, rows)], values_origin, wgmma_sp.VALUES_TRANSFORMS, multicast),
            Copy(metadata, self.metadata.at[pl.ds(first_tile, tiles)], metadata_origin, (), multicast),
        ]

    def copy_b(self, source: Any, *origin: Array) -> Copy:
        multicast = self.tiling.cluster > 1 and self.tiling.share_b
        return Copy(source, self.b, origin, wgmma_sp.DENSE_TRANSFORMS, multicast)


@dataclasses.dataclass(frozen=True)
class Loads:
    """What one job copies.

    Attributes:
      copies: from a step along k, what `look_up` gave for it, and the stage, what to copy.
      look_up: from a step along k, what its copies need to read first, which is read some steps ahead. It
        may be asked for the step after the job's last.
      gather: from what `look_up` gave and the stage, starts further copies, with `cp.async`.
    """

    copies: Callable[[Array, Any, Stage], Sequence[Copy]]
    look_up: Callable[[Array], Any] = lambda k: ()
    gather: Callable[[Any, Stage], None] | None = None


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What is written instead of the product.

    Attributes:
      out_types: of the outputs.
      store: called with a part [64, columns] of a consumer's tile, rounded, in layout WGMMA; the consumer's staging;
        the operands and the outputs in global memory; the part's first row and column in the product; and its
        number in the tile.
    """

    out_types: Sequence[jax.ShapeDtypeStruct]
    store: Callable[[Array, Any, Sequence[Any], Sequence[Any], tuple[Array, Array], int], None]


def multiply(
    tiling: Tiling,
    grid: Grid,
    jobs: Jobs,
    loads: Callable[[Any, Job], Loads],
    operands: Sequence[Array],
    out: jax.ShapeDtypeStruct,
    *,
    name: str,
    dtype: jnp.dtype,
    b_transposed: bool,
    out_transposed: bool,
    gathers: bool = False,
    epilogue: Epilogue | None = None,
) -> list[Array]:
    """Runs the jobs; gives the product, or the outputs of the epilogue.

    Args:
      tiling: of the product.
      grid: how many clusters there are, and who exchanges sums with whom.
      jobs: from the operands, the cluster and the block in it, what to compute.
      loads: from the operands and a job, what to copy.
      operands: arrays that jobs and loads read, in global memory.
      out: the product, or its transpose if `out_transposed`; sizes are multiples of 64.
      name: of the kernel, in profiles.
      dtype: of the operands that are multiplied.
      b_transposed: whether the dense operand's tiles are [tile_n, 64].
      out_transposed: whether `out` is.
      gathers: whether the loads have `gather`.
      epilogue: what to write instead of `out`; the product itself by default.
    """

    def store_product(part, slots, _, outs_gmem, origin, number):
        store_tile(part, slots, *outs_gmem, origin, first_store=number, transposed=out_transposed)

    outs, store_part = (epilogue.out_types, epilogue.store) if epilogue else ((out,), store_product)
    tile_m, tile_n = tiling.tile_m, tiling.tile_n
    consumer_m, consumer_n = tiling.consumer_tile
    blocks = consumer_m // wgmma_sp.ROWS
    many_accumulators = tile_m * tile_n > _FEW_ACCUMULATORS * 256
    producer_registers, consumer_registers = (24, 240) if many_accumulators and not gathers else (56, 224)
    workspace = (grid.contributors, tiling.cluster, CONSUMERS)

    def kernel(*refs):
        operands_gmem, results_gmem = refs[: len(operands)], refs[len(operands) :]
        outs_gmem, sums_gmem = results_gmem[: len(outs)], results_gmem[len(outs) :]
        semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR(workspace)) if grid.contributors else None

        def scope(values_smem, metadata_smem, b_smem, out_smem, full, empty):
            ring = Ring(full, empty, tiling.stages, gathers)
            ring.initialize()
            warpgroup = lax.axis_index("warpgroup")
            cluster, peer = lax.axis_index("cluster"), lax.axis_index(CLUSTER_AXIS)
            count, job_at = jobs(operands_gmem, cluster, peer)

            def produce():
                plgpu.set_max_registers(producer_registers, action="decrease")

                def fill(i, first_step):
                    job = job_at(i)
                    job_loads = loads(operands_gmem, job)

                    def look_up(j):
                        return job_loads.look_up(job.first_k + lax.min(j, job.steps))

                    def fill_step(j, looked_up):
                        slot, k = ring.slot(first_step + j), job.first_k + j
                        stage = Stage(values_smem.at[slot], metadata_smem.at[slot], b_smem.at[slot], tiling)
                        ring.fill(first_step + j, job_loads.copies(k, looked_up[0], stage))
                        following = look_up(j + _LOOK_AHEAD)
                        if gathers:
                            job_loads.gather(looked_up[0], stage)
                            ring.arrive_gathered(first_step + j)
                        return *looked_up[1:], following

                    lax.fori_loop(0, job.steps, fill_step, tuple(look_up(j) for j in range(_LOOK_AHEAD)))
                    return first_step + job.steps

                ring.close(lax.fori_loop(0, count, fill, jnp.int32(0)))

            def consume():
                plgpu.set_max_registers(consumer_registers, action="increase")
                first_row = warpgroup * consumer_m if consumer_m < tile_m else 0
                first_column = warpgroup * consumer_n if consumer_n < tile_n else 0
                rows, columns = pl.ds(first_row, consumer_m), pl.ds(first_column, consumer_n)
                row_tiles = pl.ds(first_row // wgmma_sp.ROWS, blocks)

                def operands_in(slot):
                    b = b_smem.at[slot, columns] if b_transposed else b_smem.at[slot, :, columns]
                    return values_smem.at[slot, rows], metadata_smem.at[slot, row_tiles], b

                def of_contributor(ref, part):
                    """What is this warpgroup's in the cluster that has a part of the tile; part 0 is this cluster's."""
                    contributor = _opaque(cluster) - part * grid.contributor_stride
                    return ref.at[contributor, peer, warpgroup]

                def store(accumulators, job):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # those of the tile before are long done
                    if grid.contributors:
                        partial_sums.wait(job.parts, lambda part: of_contributor(semaphores, part))
                    stores_of_a_block = stores(consumer_n, out.dtype)
                    width = consumer_n // stores_of_a_block
                    for i in range(blocks * stores_of_a_block):
                        block, first = i // stores_of_a_block, i % stores_of_a_block * width
                        tile = accumulators[block][:, first : first + width]
                        if grid.contributors:
                            where = block, pl.ds(first * wgmma_sp.ROWS, width * wgmma_sp.ROWS)
                            tile = partial_sums.collect(
                                tile, job.parts, lambda part, where=where: of_contributor(sums_gmem[0], part).at[where]
                            )
                        origin = job.row + first_row + block * wgmma_sp.ROWS, job.column + first_column + first
                        part = tile.astype(out.dtype)
                        store_part(part, out_smem.at[warpgroup], operands_gmem, outs_gmem, origin, i)

                def finish(accumulators, job):
                    if not grid.contributors:
                        return store(accumulators, job)

                    @pl.when(job.contributes)
                    def _contribute():
                        partial_sums.contribute(
                            accumulators, of_contributor(sums_gmem[0], 0), of_contributor(semaphores, 0)
                        )

                    @pl.when(~job.contributes)
                    def _store():
                        store(accumulators, job)

                def compute(i, first_step):
                    steps = job_at(i).steps
                    accumulators = accumulate(
                        ring,
                        first_step,
                        steps,
                        operands_in,
                        odd=grid.odd,
                        blocks=blocks,
                        n=consumer_n,
                        b_transposed=b_transposed,
                    )
                    finish(accumulators, job_at(_opaque(i)))
                    return first_step + steps

                lax.fori_loop(0, count, compute, jnp.int32(0))
                plgpu.wait_smem_to_gmem(0)

            lax.cond(warpgroup == _PRODUCER, produce, consume)

        b_tile = (tile_n, STEP) if b_transposed else (STEP, tile_n)
        pl.run_scoped(
            scope,
            plgpu.SMEM((tiling.stages, tile_m, wgmma_sp.KEPT), dtype, transforms=wgmma_sp.VALUES_TRANSFORMS),
            plgpu.SMEM((tiling.stages, tile_m // wgmma_sp.ROWS, 1, 128), jnp.int32),
            plgpu.SMEM((tiling.stages, *b_tile), dtype, transforms=wgmma_sp.DENSE_TRANSFORMS),
            staging(CONSUMERS, tiling.store_slots, out.dtype, transposed=out_transposed),
            full_barriers(tiling.stages),
            empty_barriers(tiling.stages, CONSUMERS),
            collective_axes="warpgroup",
        )

    sums = jax.ShapeDtypeStruct((*workspace, blocks, wgmma_sp.ROWS * consumer_n), jnp.float32)
    results = plgpu.kernel(
        kernel,
        out_type=[*outs, sums] if grid.contributors else [*outs],
        grid=(grid.clusters,),
        grid_names=("cluster",),
        cluster=(tiling.cluster,),
        cluster_names=(CLUSTER_AXIS,),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        kernel_name=name,
    )(*operands)
    return results[: len(outs)]


def _opaque(number: Array) -> Array:
    """The same, unknown to the compiler: what depends on it is not kept in registers that accumulators need."""

    @plgpu.inline_mgpu(arg_types=(SCALAR,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def emit(_, number):
        return wgmma_sp.splat(ptx("mov.b32 $0, $1;", "=r,r", [number.registers.item()], i32_type()))

    return emit(number)
