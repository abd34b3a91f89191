"""2:4 matrix times dense matrix in FP8: e4m3 times e4m3, summed in float32.

It is matmul_24.py with another instruction, which takes twice the columns a step and wants the contracted dimension of
both operands last. The result is multiplied by a scale for each row as it is stored.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from sparse_lm.ops.formats import TILE, Sparse24
from sparse_lm.ops.fp8 import E4M3
from sparse_lm.ops.hopper.frame import split_k, wgmma_sp
from sparse_lm.ops.hopper.frame.compat import LOAD_ALL
from sparse_lm.ops.hopper.frame.operands import pad_to, result_type, round_up
from sparse_lm.ops.hopper.frame.persistent import multiply
from sparse_lm.ops.hopper.frame.store import store_tile
from sparse_lm.ops.hopper.frame.tiling import Epilogue, Loads
from sparse_lm.ops.hopper.products.matmul_24 import CANDIDATES, Config

STEP = wgmma_sp.step_columns(E4M3)
_ROW_SCALES = plgpu.Layout.WGMMA.reduce(1)


def matmul_24_fp8(
    a: Sparse24, b_t: Array, scale: Array, *, out_dtype: DTypeLike = jnp.bfloat16, config: Config | None = None
) -> Array:
    """See `sparse_lm.ops.matmul_24_fp8`.

    Raises:
      NotImplementedError: the dtypes, or a K that is no multiple of 128.
    """
    if (a.dtype, b_t.dtype) != (E4M3, E4M3) or out_dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"needs operands in {E4M3.__name__} and gives bfloat16 or float32, not {a.dtype}, {b_t.dtype}, {out_dtype}"
        )
    (m, k), n = a.shape, b_t.shape[0]
    if k % STEP:
        raise NotImplementedError(f"needs K = {k} to be a multiple of {STEP}")
    config = config or split_k.fastest(CANDIDATES, m, n, k // STEP)
    out = result_type(m, n, out_dtype)
    return _call(config, a, pad_to(b_t, (round_up(n), k)), scale, out)[:m, :n]


def _call(config: Config, a: Sparse24, b_t: Array, scale: Array, out: jax.ShapeDtypeStruct) -> Array:
    (m, k), n = a.values.shape, b_t.shape[0]
    steps = 2 * k // STEP
    plan = split_k.plan_product(config, m, n, steps, split=config.split_tail)
    # The words of a step's instructions one after the other: what one copy brings.
    metadata = a.metadata.reshape(m // TILE, steps, -1)
    # Rows past the end are computed, too.
    scale = pad_to(scale, (config.grid(m, n)[0] * config.cluster_m, 1))[:, 0]

    def jobs(_, cluster, peer):
        def origin(tile):
            tile = plgpu.planar_snake(tile, config.grid(m, n), 0, config.raster_width)
            return config.origin(*tile, peer)

        return plan.jobs(cluster, origin)

    def loads(operands, job):
        values, metadata, b_t, _ = operands

        def copies(k, _, stage):
            return [*stage.copy_sparse(values, metadata, job.row, k), stage.copy_b(b_t, job.column, k * STEP)]

        return Loads(copies)

    def store(part, slots, operands, outs, origin, number):
        rows = operands[-1].at[pl.ds(origin[0], TILE)]
        rows = plgpu.load(rows, *LOAD_ALL, layout=_ROW_SCALES, optimized=False)
        scaled = part * lax.broadcast_in_dim(rows.astype(part.dtype), part.shape, (0,))
        store_tile(scaled, slots, *outs, origin, first_store=number, transposed=False)

    (product,) = multiply(
        config,
        plan.grid,
        jobs,
        loads,
        (a.values, metadata, b_t, scale),
        out,
        name="matmul_24_fp8",
        dtype=E4M3,
        b_transposed=True,
        out_transposed=False,
        epilogue=Epilogue((out,), store),
    )
    return product
