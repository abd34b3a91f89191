"""Cross entropy on Hopper: a product whose epilogue makes odds, so that no float32 logits are written.

Why this exists: XLA writes logits in float32 and reads them back, 8 bytes each. Here a tile of the product becomes odds
while it lies in registers: they are written once, 2 bytes, and products read them.

A persistent grid of warp-specialised thread blocks: one warpgroup copies, two compute the halves of a tile of 128
tokens by 256 columns. Blocks of a cluster lie under one another, and share the copies of w.

Numerics: float32 accumulation, in which tensor cores may lose a last bit at each of D / 16 additions. The target's
logit is a float32 sum of its own, so the odds of a token are wrong by one common factor, 1 + D / 16 of those bits.
Sums are float32, of odds before they are rounded.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from sparse_lm.ops.checks import check_multiples
from sparse_lm.ops.cross_entropy import LARGEST_LOG_ODDS
from sparse_lm.ops.hopper.frame import compat
from sparse_lm.ops.hopper.frame.operands import swizzled
from sparse_lm.ops.hopper.frame.schedule import core_count

_ROWS, _COLUMNS, _STEP = 64, 256, 64  # of a warpgroup's part of a tile, and of a step along k
_CONSUMERS = 2
_BLOCK = _CONSUMERS * _ROWS  # tokens of a block's tile
_STORED = 64  # columns of a tile that are stored at a time
_SLOTS = 2
_STAGES = 4  # steps along k that are in flight
_RASTER_WIDTH = 8  # clusters' tiles along tokens in the band that the blocks which run together cover
_OF_TILE, _OF_ROWS = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


def cross_entropy(x: Array, w: Array, targets: Array, classes: int) -> tuple[Array, Array]:
    """See `ops.cross_entropy`. Operands must be bfloat16; V and D must be multiples of 256, and T of 128."""
    rows = jnp.take(w, targets, axis=0)
    of_targets = jnp.sum(x.astype(jnp.float32) * rows.astype(jnp.float32), axis=1)
    values, sums = odds(x, w, targets, of_targets, classes)
    losses = jnp.log1p(jnp.sum(sums, axis=0))
    return jnp.where(jnp.isfinite(of_targets), losses, jnp.nan), values


def odds(x: Array, w: Array, targets: Array, of_targets: Array, classes: int) -> tuple[Array, Array]:
    """Computes the odds of `ops.cross_entropy` [T, V], and of each token their sums by tile of 256 columns.

    The sums, f32[V / 256, T], are of the odds before they are rounded. `of_targets`, f32[T], are the targets' logits.
    """
    (tokens, depth), vocabulary = x.shape, w.shape[0]
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, not {x.dtype}")
    check_multiples({"T": (tokens, _BLOCK), "V": (vocabulary, _COLUMNS), "D": (depth, _STEP * _STAGES)})
    cluster = 2 if tokens % (2 * _BLOCK) == 0 else 1
    sums = jax.ShapeDtypeStruct((vocabulary // _COLUMNS, tokens), jnp.float32)
    run = plgpu.kernel(
        functools.partial(_kernel, classes=classes, cluster=cluster),
        out_type=(jax.ShapeDtypeStruct((tokens, vocabulary), x.dtype), sums),
        grid=(core_count() // cluster,),
        grid_names=("cluster_grid",),
        cluster=(cluster,),
        cluster_names=("cluster",),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="odds",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return tuple(run(x, w, targets, of_targets))


def _kernel(x, w, targets, of_targets, out, sums, *, classes: int, cluster: int):
    (tokens, depth), vocabulary = x.shape, w.shape[0]
    grid = tokens // (_BLOCK * cluster), vocabulary // _COLUMNS

    def pipeline(body, compute_context):
        def spec(rows, **shared):
            return plgpu.BlockSpec((rows, _STEP), lambda k: (0, k), transforms=swizzled(x.dtype), **shared)

        collective_axes = ("cluster",) if cluster > 1 else ()
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(depth // _STEP,),
            memory_registers=40,
            in_specs=[spec(_BLOCK), spec(_COLUMNS, collective_axes=collective_axes)],
            wg_axis="warpgroup",
            num_compute_wgs=_CONSUMERS,
            max_concurrent_steps=_STAGES,
            compute_context=compute_context,
        )

    def scope(allocations, staging):
        warpgroup, peer = lax.axis_index("warpgroup"), lax.axis_index("cluster")

        def of_rows(array, token):
            return compat.load(array.at[pl.ds(token, _ROWS)], _OF_ROWS, optimized=False)

        def odds_of(logits, first_column, target, of_target):
            def spread(of_rows):
                return lax.broadcast_in_dim(of_rows, logits.shape, [0])

            log2_e = math.log2(math.e)
            exponents = logits * log2_e - spread(of_target * log2_e)
            # Not a minimum, which would make a number of NaN.
            exponents = jnp.where(exponents > LARGEST_LOG_ODDS * log2_e, LARGEST_LOG_ODDS * log2_e, exponents)
            columns = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=_OF_TILE)
            is_nothing = columns == spread(target - first_column)
            if classes < vocabulary:
                is_nothing |= columns >= classes - first_column
            return jnp.where(is_nothing, 0.0, jnp.exp2(exponents))

        def store(values, tile, column, token):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            sums[column, pl.ds(token, _ROWS)] = values.sum(axis=1)
            rounded = values.astype(out.dtype)
            for number in range(_COLUMNS // _STORED):
                columns = slice(number * _STORED, (number + 1) * _STORED)
                slot = staging.at[warpgroup, number % _SLOTS]
                plgpu.wait_smem_to_gmem(_SLOTS - 1, wait_read_only=True)
                slot[...] = rounded[:, columns]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(slot, tile.at[:, columns])

        @plgpu.nd_loop((math.prod(grid),), collective_axes="cluster_grid")
        def _tiles(loop):
            row, column = plgpu.planar_snake(loop.index[0], grid, 0, _RASTER_WIDTH)
            first_token, first_column = (row * cluster + peer) * _BLOCK, column * _COLUMNS

            def multiply(_, x_smem, w_smem, accumulator):
                rows = x_smem.at[pl.ds(warpgroup * _ROWS, _ROWS)]
                plgpu.wgmma(accumulator, rows, w_smem.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                return accumulator

            def compute(run_pipeline):
                def with_accumulator(accumulator):
                    run_pipeline(accumulator)
                    return accumulator[...]

                token = first_token + warpgroup * _ROWS
                of_target = of_rows(targets, token), of_rows(of_targets, token)
                logits = pl.run_scoped(with_accumulator, plgpu.ACC((_ROWS, _COLUMNS), jnp.float32))
                values = odds_of(logits, first_column, *of_target)
                store(values, out.at[pl.ds(token, _ROWS), pl.ds(first_column, _COLUMNS)], column, token)

            tiles = x.at[pl.ds(first_token, _BLOCK)], w.at[pl.ds(first_column, _COLUMNS)]
            pipeline(multiply, compute)(*tiles, allocations=allocations)

    pl.run_scoped(
        scope,
        pipeline(lambda *_: None, lambda _: None).get_allocations(x, w),
        plgpu.SMEM((_CONSUMERS, _SLOTS, _ROWS, _STORED), out.dtype, transforms=swizzled(out.dtype)),
        collective_axes="warpgroup",
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
