"""Cross entropy on Hopper: a product whose epilogue makes exponentials, so that no float32 logits are written.

Why this exists: XLA writes logits in float32 and reads them three times, for maxima, sums and gradients: 16 bytes
each. Here a tile of the product becomes exponentials while it lies in registers. They are written once and read once,
4 bytes, and XLA makes gradients from them in the pass that it had before.

A persistent grid of warp-specialised thread blocks: one warpgroup copies, two compute the halves of a tile of 128
tokens by 256 columns. Blocks of a cluster lie under one another, and share the copies of w.

Numerics: float32 accumulation, which tensor cores may truncate. A row of a tile is relative to its own maximum, so
that no exponential overflows. Maxima and sums are float32. Exponentials are rounded once, and gradients once more. A
NaN or an inf among logits makes the sum of its row NaN.
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
from sparse_lm.ops.hopper.frame.operands import check_multiples

_ROWS, _COLUMNS, _STEP = 64, 256, 64  # of a warpgroup's part of a tile, and of a step along k
_CONSUMERS = 2
_BLOCK = _CONSUMERS * _ROWS  # tokens of a block's tile
_STORED = 64  # columns of a tile that are stored at a time
_SLOTS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """A way to cut up the product.

    Attributes:
      stages: steps along k that are in flight.
      cluster: blocks whose tiles are under one another, and share the copies of w.
      raster_width: clusters' tiles along tokens in the band that the blocks which run together cover.
    """

    stages: int = 4
    cluster: int = 2
    raster_width: int = 8


def cross_entropy(x: Array, w: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    """See `ops.cross_entropy`. Operands must be bfloat16; V and D must be multiples of 256, and T of 128."""
    values, maxima, sums = exponentials(x, w)
    maximum = jnp.max(maxima, axis=0)
    log_normaliser = maximum + jnp.log(jnp.sum(sums * jnp.exp(maxima - maximum), axis=0))
    log_probability = _logits_of_targets(x, w, targets, maxima) - log_normaliser

    by_tile = values.shape[0], maxima.shape[0], -1
    factors = (jnp.exp(maxima - log_normaliser) * weights).T[:, :, None]
    # A target's gradient is its probability less 1. Where a model is sure, that must not come of a rounded number.
    of_target = (jnp.expm1(log_probability) * weights)[:, None, None]
    is_target = targets[:, None, None] == jnp.arange(w.shape[0]).reshape(1, *by_tile[1:])
    gradients = jnp.where(is_target, of_target, values.reshape(by_tile).astype(jnp.float32) * factors)
    return -log_probability, gradients.reshape(values.shape).astype(x.dtype)


def _logits_of_targets(x: Array, w: Array, targets: Array, maxima: Array) -> Array:
    """Computes the logits of the targets, f32[T], in sums of their own.

    The product may lose a last bit at each of its D / 16 additions, and these sums do not. Where a model is sure, the
    normaliser and the target's logit differ by less than that, so both must be of the product. Hence a target that
    leads its tile has the tile's maximum.
    """
    rows = jnp.take(w, targets, axis=0)
    logits = jnp.sum(x.astype(jnp.float32) * rows.astype(jnp.float32), axis=1)
    leading = jnp.take_along_axis(maxima, targets[None] // _COLUMNS, axis=0)[0]
    lost = x.shape[1] / 16 * jnp.finfo(jnp.float32).eps * jnp.abs(leading)
    return jnp.where(logits >= leading - lost, leading, logits)


def exponentials(x: Array, w: Array, config: Config | None = None) -> tuple[Array, Array, Array]:
    """Computes exp(x w^T - maximum) for tiles of 256 columns, with the maxima and the sums of each row.

    Args:
      x: bf16[T, D], T a multiple of 128 times the cluster, D of 64 times the stages.
      w: bf16[V, D], V a multiple of 256.
      config: the best one for T by default.

    Returns:
      exponentials: bf16[T, V].
      maxima: f32[V / 256, T], of x w^T.
      sums: f32[V / 256, T], of the exponentials before they were rounded.

    Raises:
      NotImplementedError: sizes are no such multiples, or a dtype is another.
    """
    (tokens, depth), vocabulary = x.shape, w.shape[0]
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, not {x.dtype}")
    if config is None:
        config = Config() if tokens % (2 * _BLOCK) == 0 else Config(cluster=1)
    units = _BLOCK * config.cluster, _COLUMNS, _STEP * config.stages
    check_multiples({"T": (tokens, units[0]), "V": (vocabulary, units[1]), "D": (depth, units[2])})
    stats = jax.ShapeDtypeStruct((vocabulary // _COLUMNS, tokens), jnp.float32)
    run = plgpu.kernel(
        functools.partial(_kernel, config=config),
        out_type=(jax.ShapeDtypeStruct((tokens, vocabulary), x.dtype), stats, stats),
        grid=(core_count() // config.cluster,),
        grid_names=("cluster_grid",),
        cluster=(config.cluster,),
        cluster_names=("cluster",),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="exponentials",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return tuple(run(x, w))


def _transforms(columns: int) -> tuple:
    swizzle = plgpu.find_swizzle(columns * 16)
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def _kernel(x, w, out, maxima, sums, *, config: Config):
    (tokens, depth), vocabulary = x.shape, w.shape[0]
    grid = tokens // (_BLOCK * config.cluster), vocabulary // _COLUMNS

    def pipeline(body, compute_context):
        def spec(rows, **shared):
            return plgpu.BlockSpec(
                (rows, _STEP), lambda k: (0, k), transforms=_transforms(_STEP), memory_space=plgpu.SMEM, **shared
            )

        shared = dict(collective_axes=("cluster",)) if config.cluster > 1 else {}
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(depth // _STEP,),
            memory_registers=40,
            in_specs=[spec(_BLOCK), spec(_COLUMNS, **shared)],
            wg_axis="warpgroup",
            num_compute_wgs=_CONSUMERS,
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
            maxima[column, pl.ds(token, _ROWS)] = maximum
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
            row, column = plgpu.planar_snake(loop.index[0], grid, 0, config.raster_width)
            first_token, first_column = (row * config.cluster + peer) * _BLOCK, column * _COLUMNS

            def multiply(_, x_smem, w_smem, accumulator):
                rows = x_smem.at[pl.ds(warpgroup * _ROWS, _ROWS)]
                plgpu.wgmma(accumulator, rows, w_smem.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                return accumulator

            def compute(run_pipeline):
                def with_accumulator(accumulator):
                    run_pipeline(accumulator)
                    return accumulator[...]

                logits = pl.run_scoped(with_accumulator, plgpu.ACC((_ROWS, _COLUMNS), jnp.float32))
                token = first_token + warpgroup * _ROWS
                store(logits, out.at[pl.ds(token, _ROWS), pl.ds(first_column, _COLUMNS)], column, token)

            pipeline(multiply, compute)(
                x.at[pl.ds(first_token, _BLOCK)],
                w.at[pl.ds(first_column, _COLUMNS)],
                allocations=allocations,
            )

    pl.run_scoped(
        scope,
        pipeline(ignore, ignore).get_allocations(x, w),
        plgpu.SMEM((_CONSUMERS, _SLOTS, _ROWS, _STORED), out.dtype, transforms=_transforms(_STORED)),
        collective_axes="warpgroup",
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
