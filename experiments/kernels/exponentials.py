"""The logits' product on Hopper, whose epilogue makes exponentials: logits are never written.

A candidate for the loss. A tile of the product is [128, 256]; each row of it is divided by its largest exponential.

Numerics: float32 accumulation and statistics; exponentials are rounded once.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from sparse_lm.ops.hopper.frame.device import core_count

ROWS, COLUMNS, STEP = 64, 256, 64  # of a warpgroup's part of a tile, and of a step along k
CONSUMERS = 2
STORED = 64  # columns of a tile that are stored at a time
SLOTS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """A way to cut up the product.

    Attributes:
      stages: steps along k that are in flight.
      cluster: blocks whose tiles are under one another, and share the copies of `table`.
      raster_width: clusters' tiles along tokens in the band that the blocks which run together cover.
    """

    stages: int = 4
    cluster: int = 2
    raster_width: int = 8


def exponentials(hidden: Array, table: Array, config: Config = Config()) -> tuple[Array, Array, Array]:
    """Computes exp(hidden table^T - maximum) for tiles of 256 columns, with the maxima and the sums of each row.

    Args:
      hidden: bf16[T, D], T a multiple of 128 times the cluster, D of 64.
      table: bf16[V, D], V a multiple of 256.

    Returns:
      exponentials: bf16[T, V].
      maxima: f32[V / 256, T], of the logits.
      sums: f32[V / 256, T], of the exponentials before they were rounded.
    """
    (tokens, depth), vocabulary = hidden.shape, table.shape[0]
    block = CONSUMERS * ROWS
    if tokens % (block * config.cluster) or vocabulary % COLUMNS or depth % STEP:
        raise ValueError(f"[{tokens}, {depth}] x [{vocabulary}, {depth}] must be whole tiles")
    stats = jax.ShapeDtypeStruct((vocabulary // COLUMNS, tokens), jnp.float32)
    run = plgpu.kernel(
        functools.partial(_kernel, config=config),
        out_type=(jax.ShapeDtypeStruct((tokens, vocabulary), hidden.dtype), stats, stats),
        grid=(core_count() // config.cluster,),
        grid_names=("cluster_grid",),
        cluster=(config.cluster,),
        cluster_names=("cluster",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="exponentials",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return tuple(run(hidden, table))


def _transforms(columns: int) -> tuple:
    swizzle = plgpu.find_swizzle(columns * 16)
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def _kernel(hidden, table, out, maxima, sums, *, config: Config):
    (tokens, depth), vocabulary = hidden.shape, table.shape[0]
    block = CONSUMERS * ROWS
    grid = tokens // (block * config.cluster), vocabulary // COLUMNS

    def pipeline(body, compute_context):
        def spec(rows, **shared):
            return plgpu.BlockSpec(
                (rows, STEP), lambda k: (0, k), transforms=_transforms(STEP), memory_space=plgpu.SMEM, **shared
            )

        shared = dict(collective_axes=("cluster",)) if config.cluster > 1 else {}
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(depth // STEP,),
            memory_registers=40,
            in_specs=[spec(block), spec(COLUMNS, **shared)],
            wg_axis="warpgroup",
            num_compute_wgs=CONSUMERS,
            max_concurrent_steps=config.stages,
            compute_context=compute_context,
        )

    def ignore(*_, **__):
        return None

    def scope(allocations, staging):
        warpgroup, peer = lax.axis_index("warpgroup"), lax.axis_index("cluster")

        def store(logits, tile, column, token):
            log2_e = math.log2(math.e)
            maximum = logits.max(axis=1)
            scaled = lax.broadcast_in_dim(maximum * log2_e, logits.shape, [0])
            values = jnp.exp2(logits * log2_e - scaled)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            maxima[column, pl.ds(token, ROWS)] = maximum
            sums[column, pl.ds(token, ROWS)] = values.sum(axis=1)
            rounded = values.astype(out.dtype)
            for number in range(COLUMNS // STORED):
                columns = slice(number * STORED, (number + 1) * STORED)
                slot = staging.at[warpgroup, number % SLOTS]
                plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
                slot[...] = rounded[:, columns]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(slot, tile.at[:, columns])

        @plgpu.nd_loop((math.prod(grid),), collective_axes="cluster_grid")
        def _tiles(loop):
            row, column = plgpu.planar_snake(loop.index[0], grid, 0, config.raster_width)
            first_token, first_column = (row * config.cluster + peer) * block, column * COLUMNS

            def multiply(_, hidden_smem, table_smem, accumulator):
                rows = hidden_smem.at[pl.ds(warpgroup * ROWS, ROWS)]
                plgpu.wgmma(accumulator, rows, table_smem.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                return accumulator

            def compute(run_pipeline):
                def with_accumulator(accumulator):
                    run_pipeline(accumulator)
                    return accumulator[...]

                logits = pl.run_scoped(with_accumulator, plgpu.ACC((ROWS, COLUMNS), jnp.float32))
                token = first_token + warpgroup * ROWS
                store(logits, out.at[pl.ds(token, ROWS), pl.ds(first_column, COLUMNS)], column, token)

            pipeline(multiply, compute)(
                hidden.at[pl.ds(first_token, block)],
                table.at[pl.ds(first_column, COLUMNS)],
                allocations=allocations,
            )

    pl.run_scoped(
        scope,
        pipeline(ignore, ignore).get_allocations(hidden, table),
        plgpu.SMEM((CONSUMERS, SLOTS, ROWS, STORED), out.dtype, transforms=_transforms(STORED)),
        collective_axes="warpgroup",
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
