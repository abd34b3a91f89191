"""Gradients of causal attention on Hopper, in Pallas Mosaic GPU: two kernels, and their scores' gradients in between.

With S = q k^T, P = softmax(scale S) below the diagonal, and O = P v, backward takes five products. The first kernel
computes four, for 128 keys at a time: S^T and dP^T = v dO^T again by blocks, dv = P^T dO, and dk = dS^T q. It also
writes dS^T, of the blocks below the diagonal alone, from which the second kernel computes dq = dS k. No sum depends on
the order in which thread blocks run, so that the same inputs give the same bits.

dS takes S (S + 128) bytes a sequence and head of queries, until dq is computed.

A candidate: it has not run on a GPU, and no model uses it. `experiments.bench.attention` times it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

TILE = 128  # keys or queries of a thread block, half of them for each of its consumers
_HALF = TILE // 2
_CONSUMERS = 2
_BARRIER = plgpu.Barrier(num_barriers=_CONSUMERS, num_arrivals=2)
_TRANSFORMS = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
_WGMMA = plgpu.Layout.WGMMA
_GRID = ("batch", "tile", "head")
_LOG2_E = math.log2(math.e)


@jax.custom_vjp
def hopper_attention(q: Array, k: Array, v: Array) -> Array:
    """Computes causal attention by cuDNN, and its gradients by the kernels below."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _forward(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
    # The public function rounds the sums' logarithms to the dtype of q, too coarse for gradients.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    options = dict(scale=q.shape[-1] ** -0.5, mask_type=MaskType.CAUSAL, return_residual=True)
    saved = dot_product_attention(q, k, v, **options)
    return saved[0], (q, k, v, *saved)


def _backward(residuals: tuple[Array, ...], cotangent: Array) -> tuple[Array, Array, Array]:
    return attention_gradients(*residuals, cotangent)


hopper_attention.defvjp(_forward, _backward)


def attention_gradients(
    q: Array, k: Array, v: Array, out: Array, log_sum: Array, cotangent: Array
) -> tuple[Array, Array, Array]:
    """Computes the gradients of q, k and v.

    Args:
      q: [B, S, N, H], bfloat16 or float16; S a multiple of 128, H 64 or 128.
      k: [B, S, K, H], where N is a multiple of K.
      v: like k.
      out: [B, S, N, H], what attention returned.
      log_sum: float32[B, N, S], logarithms of the sums of exp(scale S) along the keys.
      cotangent: of `out`.

    Raises:
      NotImplementedError: sizes or dtypes that the kernels cannot take.
    """
    (_, s, n, h), heads = q.shape, k.shape[2]
    if s % TILE or h not in (64, 128) or n % heads or q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"S = {s} must be a multiple of {TILE}, H = {h} one of 64 and 128, N = {n} a multiple of K = {heads}, "
            f"and {q.dtype} bfloat16 or float16"
        )
    delta = jnp.sum(out.astype(jnp.float32) * cotangent.astype(jnp.float32), axis=-1).swapaxes(1, 2)  # [B, N, S]
    dk, dv, ds = _keys_values(q, k, v, cotangent, _LOG2_E * log_sum, delta)
    return _queries(ds, q, k), dk, dv


def _pair(key_tile: Array, query_tile: Array, tiles: int) -> Array:
    """Numbers pairs of tiles below or on the diagonal, those of the same keys one after the other."""
    return key_tile * tiles - lax.div(key_tile * (key_tile - 1), 2) + query_tile - key_tile


def _keys_values(q: Array, k: Array, v: Array, do: Array, log2_sum: Array, delta: Array) -> tuple[Array, ...]:
    """Returns the gradients of k and v, and dS^T [B, N, pairs of tiles, 2, 128, 64]: halves of the queries apart."""
    b, s, n, h = q.shape
    group, tiles, dtype, scale = n // k.shape[2], s // TILE, q.dtype, q.shape[3] ** -0.5
    score = plgpu.ACC((_HALF, _HALF), jnp.float32)

    def kernel(q_gmem, k_gmem, v_gmem, do_gmem, sum_gmem, delta_gmem, *refs):
        dk_gmem, dv_gmem, ds_gmem, k_smems, v_smems, ds_smems, barriers = refs
        batch, tile, kv_head = (lax.axis_index(name) for name in _GRID)
        consumer = lax.axis_index("warpgroup")
        first_key = tile * TILE + consumer * _HALF
        keys = batch, pl.ds(first_key, _HALF), kv_head
        k_smem, v_smem, ds_smem, barrier = (x.at[consumer] for x in (k_smems, v_smems, ds_smems, barriers))

        def context(run):
            plgpu.copy_gmem_to_smem(k_gmem.at[keys], k_smem, barrier)
            plgpu.copy_gmem_to_smem(v_gmem.at[keys], v_smem, barrier)
            plgpu.barrier_wait(barrier)

            def accumulate(dk, dv):
                run((dk, dv))
                return dk[...], dv[...]

            accumulator = plgpu.ACC((_HALF, h), jnp.float32)
            dk, dv = pl.run_scoped(accumulate, accumulator, accumulator)
            k_smem[...], v_smem[...] = (scale * dk).astype(dtype), dv.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_smem, dk_gmem.at[keys])
            plgpu.copy_smem_to_gmem(v_smem, dv_gmem.at[keys])
            plgpu.wait_smem_to_gmem(0)

        def step(index, q_smem, do_smem, sum_smem, delta_smem, *refs):
            q_used, do_used, sum_used, delta_used, (dk, dv) = refs
            block, member = index
            first_query = tile * TILE + block * _HALF

            def along_queries(x):
                return lax.broadcast_in_dim(x, (_HALF, _HALF), [1])

            def positions(dimension):
                return plgpu.broadcasted_iota(jnp.int32, (_HALF, _HALF), dimension, layout=_WGMMA)

            def gradient_of_scores(s_sum, dp_sum):
                plgpu.wgmma(s_sum, k_smem, q_smem.transpose((1, 0)))
                plgpu.wgmma(dp_sum, v_smem, do_smem.transpose((1, 0)))
                log2_sum = _load_row(sum_smem)
                plgpu.barrier_arrive(sum_used)
                s = plgpu.wgmma_accumulator_load(s_sum, wait_n=1)

                def masked():
                    return jnp.where(first_key + positions(0) <= first_query + positions(1), s, -jnp.inf)

                s = lax.cond(first_key + _HALF > first_query, masked, lambda: s)
                p = jnp.exp2(s * (scale * _LOG2_E) - along_queries(log2_sum))
                plgpu.wgmma(dv, p.astype(dtype), do_smem)
                delta = _load_row(delta_smem)
                plgpu.barrier_arrive(delta_used)
                dp = plgpu.wgmma_accumulator_load(dp_sum, wait_n=1)  # dv goes on meanwhile
                return (p * (dp - along_queries(delta))).astype(dtype)

            ds = pl.run_scoped(gradient_of_scores, score, score)
            plgpu.wgmma(dk, ds, q_smem)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            ds_smem[...] = ds
            plgpu.commit_smem()
            pair = _pair(tile, tile + lax.div(block, 2), tiles)
            rows = pl.ds(consumer * _HALF, _HALF)
            plgpu.copy_smem_to_gmem(ds_smem, ds_gmem.at[batch, kv_head * group + member, pair, lax.rem(block, 2), rows])
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(do_used)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(q_used)
            return dk, dv

        def query_block(block, member):
            return 2 * tile + block, kv_head * group + member

        def matrix(block, member):
            block, head = query_block(block, member)
            return block, head, 0

        def row(block, member):
            block, head = query_block(block, member)
            return head, block

        matrices = plgpu.BlockSpec((_HALF, None, h), matrix, transforms=_TRANSFORMS)
        rows = plgpu.BlockSpec((None, _HALF), row)
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(2 * (tiles - tile), group),
            in_specs=[matrices, matrices, rows, rows],
            max_concurrent_steps=2,
            num_compute_wgs=_CONSUMERS,
            memory_registers=32,
            wg_axis="warpgroup",
            manual_consumed_barriers=True,
            compute_context=context,
        )(q_gmem.at[batch], do_gmem.at[batch], sum_gmem.at[batch], delta_gmem.at[batch])

    pairs = tiles * (tiles + 1) // 2
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(k.shape, dtype),
            jax.ShapeDtypeStruct(v.shape, dtype),
            jax.ShapeDtypeStruct((b, n, pairs, 2, TILE, _HALF), dtype),
        ),
        scratch_types=[*_matrices(dtype, h, h, _HALF), _BARRIER],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(b, tiles, k.shape[2]),
        grid_names=_GRID,
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="attention_grad_keys_values",
    )(q, k, v, do, log2_sum, delta)


def _queries(ds: Array, q: Array, k: Array) -> Array:
    """Returns the gradient of q, like q, from dS^T and k."""
    b, s, n, h = q.shape
    group, tiles, scale = n // k.shape[2], s // TILE, h**-0.5

    def kernel(ds_gmem, k_gmem, dq_gmem, dq_smems):
        batch, from_end, head = (lax.axis_index(name) for name in _GRID)
        tile = tiles - 1 - from_end  # the last queries have the most keys
        consumer = lax.axis_index("warpgroup")
        dq_smem = dq_smems.at[consumer]

        def context(run):
            def accumulate(accumulator):
                run(accumulator)
                return accumulator[...]

            dq = pl.run_scoped(accumulate, plgpu.ACC((_HALF, h), jnp.float32))
            dq_smem[...] = (scale * dq).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(dq_smem, dq_gmem.at[batch, pl.ds(tile * TILE + consumer * _HALF, _HALF), head])
            plgpu.wait_smem_to_gmem(0)

        def step(_, ds_smem, k_smem, accumulator):
            plgpu.wgmma(accumulator, ds_smem.at[consumer].transpose((1, 0)), k_smem)
            plgpu.wgmma_wait(0)
            return accumulator

        halves = plgpu.BlockSpec(
            (None, 2, TILE, _HALF), lambda key_tile: (_pair(key_tile, tile, tiles), 0, 0, 0), transforms=_TRANSFORMS
        )
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(tile + 1,),
            in_specs=[halves, plgpu.BlockSpec((TILE, h), lambda key_tile: (key_tile, 0), transforms=_TRANSFORMS)],
            max_concurrent_steps=3,
            num_compute_wgs=_CONSUMERS,
            memory_registers=32,
            wg_axis="warpgroup",
            compute_context=context,
        )(ds_gmem.at[batch, head], k_gmem.at[batch, :, lax.div(head, group)])

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=_matrices(q.dtype, h),
        grid=(b, tiles, n),
        grid_names=_GRID,
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="attention_grad_queries",
    )(ds, k)


def _load_row(ref: Any) -> Array:
    """Loads a number for each column of a score's tile."""
    index = () if jax.__version_info__ >= (0, 11) else ((),)
    return plgpu.load(ref, *index, layout=_WGMMA.reduce(0))


def _matrices(dtype: jnp.dtype, *columns: int) -> list[Any]:
    """Allocates 64 rows of so many columns for each consumer."""
    return [plgpu.SMEM((_CONSUMERS, _HALF, count), dtype, transforms=_TRANSFORMS) for count in columns]
