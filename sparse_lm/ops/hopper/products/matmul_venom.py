"""Multiplies a V:2:M matrix by a dense one: the 2:4 product over condensed columns.

The 2:4 operand comes by TMA, as in `matmul_24`. The 64 rows of b of each step are gathered (gather.py), or copied as a
box where columns are contiguous. All rows of a tile lie in one Venom block, so that a gathered row serves them all:
every v rows, at most 256, read their own rows of b, 2 Kc N bytes, from the L2 cache. Where rows are to be put back into
the order of the tokens, each is stored where it belongs (store.py), which saves a pass over the result.

Numerics: as `matmul_24`, in the order of the condensed columns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from sparse_lm.ops.checks import product_dtype
from sparse_lm.ops.formats import SparseVenom
from sparse_lm.ops.hopper.frame import gather, split_k, wgmma_sp
from sparse_lm.ops.hopper.frame.operands import pad, result_type
from sparse_lm.ops.hopper.frame.persistent import multiply
from sparse_lm.ops.hopper.frame.schedule import rows_in_use
from sparse_lm.ops.hopper.frame.store import store_rows
from sparse_lm.ops.hopper.frame.tiling import STEP, Loads, Tiling
from sparse_lm.ops.row_order import RowOrder

# What a cluster has of rows divides v. A band's tiles are along N: the L2 cache should hold the part of b under them.
# Times were measured on an H200: what a cluster shares decides how much it reads of the L2 cache.
CANDIDATES = (
    Tiling(256, 192, share_b=False, raster_width=2, time=1.35),
    Tiling(256, 128, share_b=False, raster_width=4, time=1.0),
    Tiling(128, 256, share_b=False, raster_width=2, time=1.06),
    Tiling(64, 256, share_b=False, raster_width=2, time=0.92),
)
CONTIGUOUS = (
    Tiling(256, 192, share_b=False, raster_width=16, time=1.36),
    Tiling(128, 256, raster_width=16, time=1.07),
    Tiling(128, 256, share_b=False, raster_width=16, time=1.2),
)


def heuristic_config(rows: int, n: int, kept: int, v: int, *, in_boxes: bool = False) -> Tiling:
    """Chooses the candidate that is done first, of those whose tiles' rows lie in one block; refuses other v."""
    fitting = [tiling for tiling in (CONTIGUOUS if in_boxes else CANDIDATES) if v % tiling.cluster_m == 0]
    if not fitting:
        raise NotImplementedError(f"needs v to be a multiple of {wgmma_sp.ROWS}, not {v}")
    return split_k.fastest(fitting, rows, n, kept // STEP)


def matmul_venom(
    a: SparseVenom,
    b: Array,
    *,
    rows: RowOrder | None = None,
    out_dtype: DTypeLike | None = None,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.matmul_venom`; refuses dtypes that are no 16-bit floats, and a v that is no multiple of 64.

    Last blocks that list only K cost little if columns are contiguous. The clusters' tiles of a `config` must lie in
    one block.
    """
    out_dtype = product_dtype(a, b, out_dtype)
    m, n, kept = a.shape[0], b.shape[1], a.columns.shape[1]
    # Contiguous columns of whole steps need no gather, if the rows of a block fill a tile.
    in_boxes = a.contiguous % STEP == 0 and a.v % (2 * wgmma_sp.ROWS) == 0
    config = config or heuristic_config(m, n, kept, a.v, in_boxes=in_boxes)
    # For gathers, rows stay as they are: a padded column of a is row k, past the end of b.
    b = pad(b, rows=in_boxes)
    steps = a.values.shape[1] // wgmma_sp.KEPT
    padding = [rows_in_use(a.columns[:, :: a.contiguous], a.v, a.shape[1])] if in_boxes else []
    in_use = (lambda operands, row, _: row < operands[4][0]) if in_boxes else None
    schedule = split_k.schedule_product(config, m, b.shape[1], steps, in_use, band_axis=1)

    def loads(operands, job):
        values, metadata, columns, b_gmem, *_ = operands
        block = lax.div(job.row, a.v)

        def look_up_numbers(k):
            return gather.load_row_numbers(columns, block, k)

        def copy_sparse(k, _, stage):
            return stage.copy_sparse(values, metadata, job.row, k)

        def gather_b(row_numbers, stage):
            gather.start_gather(b_gmem, stage.b, row_numbers, job.column)

        def look_up_box(k):
            """Reads the first row of b; one past the end for steps past the end, which must add nothing."""
            return jnp.where(k < steps, columns[block, lax.min(k, steps - 1) * STEP], b.shape[0])

        def copy_both(k, row, stage):
            return [*copy_sparse(k, row, stage), stage.copy_b(b_gmem, row, job.column)]

        return Loads(copy_both, look_up_box) if in_boxes else Loads(copy_sparse, look_up_numbers, gather_b)

    out, numbers, store = result_type(m, b.shape[1], out_dtype), (), None
    if rows is not None:
        m = rows.position.shape[0]
        out, numbers = jax.ShapeDtypeStruct((m, b.shape[1]), out_dtype), (rows.slots[None],)
        store = store_rows(out)
    product = multiply(
        config,
        schedule,
        loads,
        (a.values, a.metadata, a.columns, b, *padding, *numbers),
        out,
        name="matmul_venom_contiguous" if in_boxes else "matmul_venom",
        gathers=not in_boxes,
        store=store,
    )
    return product[:m, :n]
