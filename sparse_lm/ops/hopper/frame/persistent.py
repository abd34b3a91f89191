"""The frame of the products with a 2:4 operand: a persistent grid of warp-specialized thread blocks.

In each block one producer warpgroup keeps a ring of shared-memory stages full, with TMA copies and
gathers, and two consumer warpgroups each hold the accumulators of half the tile. The blocks of a cluster
share one operand's tile (multicast), and so do the same steps at the same time. What is computed where
is a kernel's `Jobs` (schedule.py), what is copied its `Loads`.

What limits the products is what instructions read of shared memory, at most 128 bytes a cycle: m64nNk32 reads
2 + N / 16 KB, and computes for N / 2 cycles. Copies cost these reads little, but come from the L2 cache: so a tile
is as large as registers allow.

In CUTLASS' terms `Ring` is a PipelineTmaAsync, whose step number is index and phase in one; `Jobs` the persistent tile
scheduler, with split_k.py and stream_k.py as its stream-K modes and partial_sums.py as their fix-up; `store` the
epilogue; `planar_snake` the swizzle of thread blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from sparse_lm.ops.hopper.frame import wgmma_sp
from sparse_lm.ops.hopper.frame.emit import COMPILER_PARAMS, WARPGROUP_SIZE
from sparse_lm.ops.hopper.frame.partial_sums import Sums, opaque
from sparse_lm.ops.hopper.frame.ring import CLUSTER_AXIS, Ring, barriers
from sparse_lm.ops.hopper.frame.schedule import CLUSTER, Grid, Job, Jobs, Work
from sparse_lm.ops.hopper.frame.store import Store, columns_of_store, staging, store_tile
from sparse_lm.ops.hopper.frame.tiling import CONSUMERS, PRODUCER, STAGES, Loads, Stage, Tiling

_FEW_ACCUMULATORS = 128  # of a consumer's thread: what leaves registers to the producer
_LOOK_AHEAD = 4  # steps: a number from the L2 cache takes longer than one


def multiply(
    tiling: Tiling,
    schedule: tuple[Grid, Jobs],
    loads: Callable[[Any, Job], Loads],
    operands: Sequence[Array],
    out: jax.ShapeDtypeStruct,
    *,
    name: str,
    b_transposed: bool = False,
    out_transposed: bool = False,
    gathers: bool = False,
    store: Store | None = None,
) -> Array:
    """Runs the jobs; gives the product.

    Args:
      schedule: how many clusters there are and who exchanges sums with whom; what each computes.
      loads: from the operands and a job, what to copy.
      operands: arrays that jobs and loads read, in global memory; first the values of the 2:4 operand.
      out: the product, or its transpose if `out_transposed`; sizes are multiples of 64, but for rows that
        a `store` of one's own writes.
      b_transposed: whether the dense operand's tiles have the contracted dimension last, as those of e4m3 must.
      gathers: whether the loads have `gather`.
      store: how to write a part of `out`; as it is by default.
    """

    def store_product(part, slots, _, out_gmem, origin, number):
        store_tile(part, slots, out_gmem, origin, first_store=number, transposed=out_transposed)

    grid, jobs = schedule
    store = store or store_product
    dtype = operands[0].dtype
    own_m, own_n = tiling.consumer_tile
    blocks = own_m // wgmma_sp.ROWS
    step = wgmma_sp.step_columns(dtype)
    words = step // wgmma_sp.STEP  # of a lane's metadata in a step, for each block of 64 rows
    sizes = blocks, own_n, words
    b_tile = (tiling.tile_n, step) if b_transposed else (step, tiling.tile_n)
    # Those of a thread of the producer, and of a consumer: together at most a multiprocessor's 65,536.
    few = own_m * own_n // WARPGROUP_SIZE <= _FEW_ACCUMULATORS
    producer_registers, consumer_registers = (56, 224) if few or gathers else (24, 240)
    workspace = (grid.contributors, CLUSTER, CONSUMERS)

    def kernel(*refs):
        operands_gmem, (out_gmem, *sums_gmem) = refs[: len(operands)], refs[len(operands) :]
        semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR(workspace)) if grid.contributors else None

        def scope(values_smem, metadata_smem, b_smem, out_smem, full, empty):
            ring = Ring(full, empty, STAGES, gathers)
            ring.initialize()
            warpgroup = lax.axis_index("warpgroup")
            cluster, peer = lax.axis_index("cluster"), lax.axis_index(CLUSTER_AXIS)
            work = count, job_at = jobs(operands_gmem, cluster, peer)

            def produce():
                plgpu.set_max_registers(producer_registers, action="decrease")

                def stage_at(slot):
                    return Stage(values_smem.at[slot], metadata_smem.at[slot], b_smem.at[slot], tiling)

                _produce(ring, stage_at, work, lambda job: loads(operands_gmem, job))

            def consume():
                plgpu.set_max_registers(consumer_registers, action="increase")
                first_row = warpgroup * own_m if own_m < tiling.tile_m else 0
                first_column = warpgroup * own_n if own_n < tiling.tile_n else 0
                rows, columns = pl.ds(first_row, own_m), pl.ds(first_column, own_n)
                row_tiles = pl.ds(first_row // wgmma_sp.ROWS, blocks)  # divided here, once, rather than in the loop
                sums = Sums(grid, sums_gmem[0], semaphores, cluster, peer, warpgroup) if grid.contributors else None

                def operands_at(slot):
                    b = b_smem.at[slot, columns] if b_transposed else b_smem.at[slot, :, columns]
                    return values_smem.at[slot, rows], metadata_smem.at[slot, row_tiles], b

                def store_parts(accumulators, job):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # those of the tile before are long done
                    if sums is not None:
                        sums.wait(job.parts)
                    width = columns_of_store(out.dtype)
                    parts = itertools.product(range(blocks), range(0, own_n, width))
                    for number, (block, first) in enumerate(parts):
                        part = accumulators[block][:, first : first + width]
                        if sums is not None:
                            where = block, pl.ds(first * wgmma_sp.ROWS, width * wgmma_sp.ROWS)
                            part = sums.collect(part, job.parts, where)
                        origin = job.row + first_row + block * wgmma_sp.ROWS, job.column + first_column + first
                        store(part.astype(out.dtype), out_smem.at[warpgroup], operands_gmem, out_gmem, origin, number)

                def compute(i, first_step):
                    steps = job_at(i).steps
                    accumulators = accumulate(
                        ring, first_step, steps, operands_at, sizes, odd=grid.odd, b_transposed=b_transposed
                    )
                    job = job_at(opaque(i))
                    if sums is None:
                        store_parts(accumulators, job)
                    else:  # the cluster that has the tile's first steps adds up what others contribute
                        pl.when(job.contributes)(lambda: sums.contribute(accumulators))
                        pl.when(~job.contributes)(lambda: store_parts(accumulators, job))
                    return first_step + steps

                lax.fori_loop(0, count, compute, jnp.int32(0))
                plgpu.wait_smem_to_gmem(0)

            lax.cond(warpgroup == PRODUCER, produce, consume)

        pl.run_scoped(
            scope,
            plgpu.SMEM((STAGES, tiling.tile_m, step // 2), dtype, transforms=wgmma_sp.values_transforms(dtype)),
            plgpu.SMEM((STAGES, tiling.tile_m // wgmma_sp.ROWS, 1, WARPGROUP_SIZE * words), jnp.int32),
            plgpu.SMEM((STAGES, *b_tile), dtype, transforms=wgmma_sp.dense_transforms(dtype)),
            staging(out.dtype, transposed=out_transposed),
            *barriers(STAGES, CONSUMERS),
            collective_axes="warpgroup",
        )

    sums = jax.ShapeDtypeStruct((*workspace, blocks, wgmma_sp.ROWS * own_n), jnp.float32)
    out_types = [out, sums] if grid.contributors else [out]
    return launch(kernel, out_types, grid.clusters, name)(*operands)[0]


def accumulate(
    ring: Ring,
    first_step: Array,
    steps: int | Array,
    operands: Callable[[Array], tuple[Any, Any, Any]],
    sizes: tuple[int, ...],
    *,
    odd: bool,
    b_transposed: bool,
    load_words: Callable[[Any, Any], tuple[wgmma_sp.Words, Any]] = wgmma_sp.load_words,
) -> tuple[Array, ...]:
    """Computes one tile's product over stages `first_step` to `first_step + steps - 1` of the ring, and releases them.

    Args:
      steps: at least one.
      operands: from a slot of the ring, this warpgroup's (values, metadata, b) in shared memory.
      sizes: of the accumulators, arguments of `wgmma_sp.start`.
      odd: whether `steps` is odd, which a kernel must know when it is traced.
      load_words: called with a stage's metadata in shared memory and what was read ahead for it, returns this lane's
        words of the step and what it has read ahead. Of every two steps from `first_step` on, the first is called
        with None, and the second with what the first has read ahead: none of that outlives the second.

    Returns:
      Arrays [64, n] float32 in the layout WGMMA, one for each block of rows.
    """
    last = first_step + steps - 1

    def step(number, carry, read_ahead=None):
        slot = ring.wait_full(number)
        values, metadata, b = operands(slot)
        own_words, read_ahead = load_words(metadata, read_ahead)
        carry = wgmma_sp.step(carry, values, own_words, b, b_transposed=b_transposed)

        @pl.when(number > first_step)
        def _release_the_step_before():
            ring.release(number - 1)

        return carry, read_ahead

    def two_steps(state):
        number, carry = state
        carry, read_ahead = step(number, carry)
        carry, _ = step(number + 1, carry, read_ahead)
        return number + 2, carry

    _, carry = lax.while_loop(lambda state: state[0] < last, two_steps, (first_step, wgmma_sp.start(*sizes)))
    if odd:
        carry, _ = step(last, carry)
    accumulators = wgmma_sp.finish(carry)
    ring.release(last)
    return accumulators


def launch(kernel: Callable, out_type: Any, clusters: int, name: str) -> Callable[..., Any]:
    """Returns a function of arrays in global memory that runs a kernel, whose last warpgroup is the producer."""
    run = plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(CLUSTER,),
        cluster_names=(CLUSTER_AXIS,),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=COMPILER_PARAMS,
    )
    # A stack of products is one after the other: TMA takes no batch of matrices, and semaphores are not batched.
    return jax.custom_batching.sequential_vmap(run)


def _produce(ring: Ring, stage_at: Callable[[Array], Stage], work: Work, loads_of: Callable[[Job], Loads]) -> None:
    """Fills a stage of the ring for each step of each job; what its copies look up was read some steps before."""
    count, job_at = work

    def fill(i, first_step):
        job = job_at(i)
        loads = loads_of(job)

        def look_up(j):
            return loads.look_up(job.first_k + lax.min(j, job.steps))

        def fill_step(j, looked_up):
            slot, k = ring.slot(first_step + j), job.first_k + j
            stage = stage_at(slot)
            ring.fill(first_step + j, loads.copies(k, looked_up[0], stage))
            following = look_up(j + _LOOK_AHEAD)
            if ring.gathers:
                loads.gather(looked_up[0], stage)
                ring.arrive_gathered(first_step + j)
            return *looked_up[1:], following

        lax.fori_loop(0, job.steps, fill_step, tuple(look_up(j) for j in range(_LOOK_AHEAD)))
        return first_step + job.steps

    ring.close(lax.fori_loop(0, count, fill, jnp.int32(0)))
