"""V:2:M matrix times dense matrix: the 2:4 product over condensed columns, with gathered rows of B.

The 2:4 operand comes by TMA, as in `matmul_24`, shared by the blocks of a cluster, which compute tiles
side by side; the 64 rows of b of each step are gathered (gather.py). All rows of a tile lie in one Venom
block, so that a gathered row serves them all: every v rows, at most 256, read their own rows of b, 2 Kc N
bytes, from the L2 cache. Where rows are to be put back into the order of the tokens, each is stored where it
belongs (store_rows.py), which saves a pass over the result.

Numerics: as `matmul_24`, in the order of the condensed columns.
"""

from __future__ import annotations

import dataclasses

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from sparse_lm.ops.formats import SparseVenom
from sparse_lm.ops.hopper.frame import gather, split_k, tuning, wgmma_sp
from sparse_lm.ops.hopper.frame.operands import pad
from sparse_lm.ops.hopper.frame.persistent import multiply
from sparse_lm.ops.hopper.frame.store_rows import to_order
from sparse_lm.ops.hopper.frame.tiling import STEP, Loads, Tiling, check_in_block
from sparse_lm.ops.hopper.products.matmul_venom_contiguous import matmul_venom_contiguous
from sparse_lm.ops.kernel_dtypes import check_product_dtypes
from sparse_lm.ops.row_order import RowOrder


@dataclasses.dataclass(frozen=True)
class Config(Tiling):
    """A way to cut up the product; tile_m divides v.

    Attributes:
      raster_width: clusters' tiles along N that run together; the L2 cache should hold the part of b under them.
    """

    share_b: bool = False
    raster_width: int = 2


# With the time of a tile (measured on an H200).
CANDIDATES = (
    (Config(256, 192), 1.35),
    (Config(256, 128, raster_width=4), 1.0),
    (Config(128, 256), 1.06),
    (Config(64, 256), 0.92),
)


def heuristic_config(rows: int, n: int, kept: int, v: int) -> Config:
    """Chooses the candidate that is done first, of those whose tiles' rows lie in one block.

    Raises:
      NotImplementedError: there is none.
    """
    fitting = [candidate for candidate in CANDIDATES if v % candidate[0].tile_m == 0]
    if not fitting:
        raise NotImplementedError(f"needs v to be a multiple of {wgmma_sp.ROWS}, not {v}")
    return split_k.fastest(fitting, rows, n, kept // STEP)


def matmul_venom(
    a: SparseVenom,
    b: Array,
    *,
    rows: RowOrder | None = None,
    out_dtype: DTypeLike | None = None,
    config: Config | None = None,
) -> Array:
    """Computes a @ b.

    Args:
      a: V:2:M matrix [M, K], bfloat16 or float16, v a multiple of 64.
      b: [K, N] in the dtype of a.
      rows: the order of a's rows, from which those of the result are put back into the tokens'; as they are by default.
      out_dtype: bfloat16, float16 or float32; that of b by default.
      config: tiling of gathered rows; the tuned one for the shape and device by default.

    Returns:
      [M, N], or [T, N] of the T tokens of `rows`. Rows of b that no stored position names are not read.

    Raises:
      NotImplementedError: the dtypes, or v.
      ValueError: a config whose tiles do not lie in one block.
    """
    # Contiguous columns of whole steps need no gather, if the rows of a block fill a tile of that kernel.
    if a.contiguous % wgmma_sp.ROWS == 0 and a.v % (2 * wgmma_sp.ROWS) == 0:
        return matmul_venom_contiguous(a, b, rows=rows, out_dtype=out_dtype)
    out_dtype = jnp.dtype(out_dtype or b.dtype)
    check_product_dtypes(a.dtype, b.dtype, out_dtype)
    m, n, kept = a.shape[0], b.shape[1], a.columns.shape[1]
    if config is None:
        # The neurons of one layer: b may be that of all layers, of which a lists one's.
        neurons = kept * a.m // 4
        config = tuning.lookup("matmul_venom", (m, n, neurons, a.v, a.m), Config)
        config = config or heuristic_config(m, n, kept, a.v)
    check_in_block(config.cluster_m, a.v, "rows")
    # Rows stay as they are: a padded column of a is row k, past the end of b.
    b = pad(b, rows=False)
    return _call(config, a, b, rows, out_dtype)[: m if rows is None else rows.position.shape[0], :n]


def _call(config: Config, a: SparseVenom, b: Array, rows: RowOrder | None, out_dtype: jnp.dtype) -> Array:
    steps = a.values.shape[1] // wgmma_sp.KEPT
    grid = config.grid(a.shape[0], b.shape[1])
    plan = split_k.plan_product(config, a.shape[0], b.shape[1], steps)

    def jobs(_, cluster, peer):
        def origin(tile):
            return config.origin(*plgpu.planar_snake(tile, grid, 1, config.raster_width), peer)

        return plan.jobs(cluster, origin)

    def loads(operands, job):
        values, metadata, columns, b_gmem, *_ = operands
        block = lax.div(job.row, a.v)

        def look_up(k):
            return gather.load_row_numbers(columns, block, k)

        def copies(k, _, stage):
            return stage.copy_sparse(values, metadata, job.row, k)

        def gather_b(row_numbers, stage):
            gather.start_gather(b_gmem, stage.b, row_numbers, job.column)

        return Loads(copies, look_up, gather_b)

    destination = to_order(rows, a.shape[0], b.shape[1], out_dtype)
    (product,) = multiply(
        config,
        plan.grid,
        jobs,
        loads,
        (a.values, a.metadata, a.columns, b, *destination.operands),
        destination.out,
        name="matmul_venom",
        dtype=b.dtype,
        b_transposed=False,
        out_transposed=False,
        gathers=True,
        epilogue=destination.epilogue,
    )
    return product
