"""The frame of the products with a 2:4 operand: a persistent grid of warp-specialized thread blocks.

In each block one producer warpgroup keeps a ring of shared-memory stages full, with TMA copies and
gathers, and two consumer warpgroups each hold the accumulators of half the tile. The blocks of a cluster
share one operand's tile (multicast), and so do the same steps at the same time. What is computed where
is a kernel's `Jobs` (schedule.py), what is copied its `Loads`.

What limits the products is shared memory: an instruction m64nNk32 reads 2 + N / 16 KB in N / 2 cycles, at
most 128 bytes each, and the copies write on top of that. So a tile is as large as registers allow.
"""

from __future__ import annotations

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
from sparse_lm.ops.hopper.ring import CLUSTER_AXIS, Ring, empty_barriers, full_barriers
from sparse_lm.ops.hopper.schedule import Grid, Job, Jobs
from sparse_lm.ops.hopper.store import staging, store_tile, stores
from sparse_lm.ops.hopper.tiling import CONSUMERS, PRODUCER, STEP, Epilogue, Loads, Stage, Tiling

_FEW_ACCUMULATORS = 128  # of a consumer's thread: what leaves registers to the producer
_LOOK_AHEAD = 4  # steps: a number from the L2 cache takes longer than one


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

            lax.cond(warpgroup == PRODUCER, produce, consume)

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
