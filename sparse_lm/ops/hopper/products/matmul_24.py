"""2:4 matrix times dense matrix.

The frame is persistent.py. The two blocks of a cluster compute tiles under one another, so that they
share the tile of the dense operand.

Numerics: float32 accumulation in the order of k, in up to eight parts in the tiles of the last wave (split_k.py),
which the configuration and the number of multiprocessors decide; one rounding to the result's dtype. The same bits
come out every time.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from sparse_lm.ops import tuned
from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.hopper.frame import split_k, wgmma_sp
from sparse_lm.ops.hopper.frame.operands import pad, result_type
from sparse_lm.ops.hopper.frame.persistent import multiply
from sparse_lm.ops.hopper.frame.tiling import STEP, Loads, Tiling
from sparse_lm.ops.kernel_dtypes import check_product_dtypes


@dataclasses.dataclass(frozen=True)
class Config(Tiling):
    """A way to cut up the product.

    Attributes:
      raster_width: clusters' tiles along M in the band that the blocks which run together cover, so that the L2 cache
        serves them all.
      split_tail: whether the tiles of the last wave are split along k (split_k.py). Without, all configurations
        add up in one order, and so give the same bits.
    """

    raster_width: int = 8
    split_tail: bool = True


# Best first, with the time of a tile in units of the smaller one's (measured on an H100).
CANDIDATES = ((Config(tile_m=256, tile_n=192), 1.36), (Config(tile_m=128, tile_n=256), 1.0))


def heuristic_config(m: int, n: int, k: int) -> Config:
    """Chooses the candidate that is done first."""
    return split_k.fastest(CANDIDATES, m, n, pl.cdiv(k, STEP))


def matmul_24(
    w: Sparse24,
    b: Array,
    *,
    out_dtype: DTypeLike | None = None,
    out_transposed: bool = False,
    config: Config | None = None,
) -> Array:
    """See `sparse_lm.ops.matmul_24`.

    Rows of b at pruned positions are not read: unlike in `w.to_dense() @ b`, an inf or nan there does not reach the
    result.

    Raises:
      NotImplementedError: the dtypes.
    """
    out_dtype = jnp.dtype(out_dtype or b.dtype)
    check_product_dtypes(w.dtype, b.dtype, out_dtype)
    (m, k), n = w.shape, b.shape[1]
    if config is None:
        config = tuned.lookup(tuned.HOPPER, "matmul_24", (m, n, k), Config) or heuristic_config(m, n, k)
    shape = (n, m) if out_transposed else (m, n)
    out = _call(config, w, pad(b), result_type(*shape, out_dtype), out_transposed)
    return out[: shape[0], : shape[1]]


def _call(config: Config, w: Sparse24, b: Array, out: jax.ShapeDtypeStruct, out_transposed: bool) -> Array:
    n = b.shape[1]
    plan = split_k.plan_product(config, w.shape[0], n, w.values.shape[1] // wgmma_sp.KEPT, split=config.split_tail)

    def jobs(_, cluster, peer):
        def origin(tile):
            tile = plgpu.planar_snake(tile, config.grid(w.shape[0], n), 0, config.raster_width)
            return config.origin(*tile, peer)

        return plan.jobs(cluster, origin)

    def loads(operands, job):
        values, metadata, b = operands

        def copies(k, _, stage):
            b_row = k * STEP
            return [*stage.copy_sparse(values, metadata, job.row, k), stage.copy_b(b, b_row, job.column)]

        return Loads(copies)

    (product,) = multiply(
        config,
        plan.grid,
        jobs,
        loads,
        (w.values, w.metadata, b),
        out,
        name="matmul_24",
        dtype=b.dtype,
        b_transposed=False,
        out_transposed=out_transposed,
    )
    return product
