"""V:2:M matrix times dense matrix, where the columns of a block are contiguous: boxes of B, no gather.

The blocks of a cluster compute tiles side by side, so that they share the tile of the sparse operand;
those that run together cover a band along N, so that the rows of b that their tokens list stay in the L2
cache. Rows may be stored in the order of the tokens, as in matmul_venom.py.

Numerics: as `matmul_24`, in the order of the condensed columns.
"""

from __future__ import annotations

import dataclasses

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from sparse_lm.ops.formats import SparseVenom
from sparse_lm.ops.hopper.frame import split_k, wgmma_sp
from sparse_lm.ops.hopper.frame.operands import pad
from sparse_lm.ops.hopper.frame.persistent import multiply
from sparse_lm.ops.hopper.frame.schedule import rows_in_use
from sparse_lm.ops.hopper.frame.store_rows import to_order
from sparse_lm.ops.hopper.frame.tiling import STEP, Loads, Tiling, check_in_block
from sparse_lm.ops.kernel_dtypes import check_product_dtypes
from sparse_lm.ops.row_order import RowOrder


@dataclasses.dataclass(frozen=True)
class Config(Tiling):
    """A way to cut up the product.

    Attributes:
      raster_width: clusters' tiles along N that run together.
    """

    raster_width: int = 16


# With the time of a tile (measured on an H200): what a cluster shares decides how much it reads of the L2 cache.
CANDIDATES = (
    (Config(256, 192, share_b=False), 1.36),
    (Config(128, 256), 1.07),
    (Config(128, 256, share_b=False), 1.2),
)


def heuristic_config(rows: int, n: int, kept: int, v: int) -> Config:
    """Chooses the candidate that is done first, of those whose tiles' rows lie in one block.

    Raises:
      NotImplementedError: there is none.
    """
    fitting = [candidate for candidate in CANDIDATES if v % candidate[0].cluster_m == 0]
    if not fitting:
        raise NotImplementedError(f"needs v to be a multiple of 128, not {v}")
    return split_k.fastest(fitting, rows, n, kept // STEP)


def matmul_venom_contiguous(
    a: SparseVenom,
    b: Array,
    *,
    rows: RowOrder | None = None,
    out_dtype: DTypeLike | None = None,
    config: Config | None = None,
) -> Array:
    """Computes a @ b of contiguous columns.

    Args:
      a: V:2:M matrix [M, K], bfloat16 or float16, v and contiguous multiples of 128 and of 64. The last blocks cost
        little if they list only K, which stands for no column.
      b: [K, N] in the dtype of a.
      rows: the order of a's rows, from which those of the result are put back into the tokens'; as they are by default.
      out_dtype: bfloat16, float16 or float32; that of b by default.
      config: tiling; what a cluster has of rows divides v.

    Returns:
      [M, N], or [T, N] of the T tokens of `rows`. Rows of b that no block lists are not read.

    Raises:
      NotImplementedError: the dtypes, v, or contiguous.
      ValueError: a config whose clusters' tiles do not lie in one block.
    """
    out_dtype = jnp.dtype(out_dtype or b.dtype)
    check_product_dtypes(a.dtype, b.dtype, out_dtype)
    if a.contiguous % wgmma_sp.ROWS:
        raise NotImplementedError(f"needs contiguous columns, a multiple of {wgmma_sp.ROWS}, not {a.contiguous}")
    m, n = a.shape[0], b.shape[1]
    config = config or heuristic_config(m, n, a.columns.shape[1], a.v)
    check_in_block(config.cluster_m, a.v, "rows")
    return _call(config, a, pad(b), rows, out_dtype)[: m if rows is None else rows.position.shape[0], :n]


def _call(config: Config, a: SparseVenom, b: Array, rows: RowOrder | None, out_dtype: jnp.dtype) -> Array:
    steps = a.values.shape[1] // wgmma_sp.KEPT
    plan = split_k.plan_product(config, a.shape[0], b.shape[1], steps)

    def jobs(operands, cluster, peer):
        first_of_padding = operands[4]  # read for each job anew, from the cache: consumers lack a register for it

        def origin(tile):
            tile = plgpu.planar_snake(tile, config.grid(a.shape[0], b.shape[1]), 1, config.raster_width)
            return config.origin(*tile, peer)

        return plan.jobs(cluster, origin, lambda row, _: row < first_of_padding[0])

    def loads(operands, job):
        values, metadata, columns, b_gmem, *_ = operands
        block = lax.div(job.row, a.v)

        def look_up(k):
            """Reads the first row of b; one past the end for steps past the end, which must add nothing."""
            return jnp.where(k < steps, columns[block, lax.min(k, steps - 1) * STEP], b.shape[0])

        def copies(k, row, stage):
            return [*stage.copy_sparse(values, metadata, job.row, k), stage.copy_b(b_gmem, row, job.column)]

        return Loads(copies, look_up)

    first_of_padding = rows_in_use(a.columns[:, :: a.contiguous], a.v, a.shape[1])
    destination = to_order(rows, a.shape[0], b.shape[1], out_dtype)
    (product,) = multiply(
        config,
        plan.grid,
        jobs,
        loads,
        (a.values, a.metadata, a.columns, b, first_of_padding, *destination.operands),
        destination.out,
        name="matmul_venom_contiguous",
        dtype=b.dtype,
        b_transposed=False,
        out_transposed=False,
        epilogue=destination.epilogue,
    )
    return product
