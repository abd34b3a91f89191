"""Multiplies a V:2:M matrix by a dense one: the 2:4 product over condensed columns, with gathered rows of B.

All rows of a tile lie in one Venom block, so that a gathered row serves them all. `cp.async` takes an address
from each thread, so that a gathered row costs what any other does.
"""

from __future__ import annotations

from jax import Array
from jax.typing import DTypeLike

from sparse_lm.ops.formats import SparseVenom
from sparse_lm.ops.row_order import RowOrder, combine
from sparse_lm.ops.triton.frame.product import multiply
from sparse_lm.ops.triton.frame.tiling import Tiling, largest_that_occupies

# Largest first.
CANDIDATES = (
    Tiling(256, 128, warps_m=4, warps_n=2),
    Tiling(128, 256, warps_m=2, warps_n=4, stages=3),
    Tiling(128, 128, warps_m=2, warps_n=2, stages=3),
    Tiling(64, 128, warps_m=2, warps_n=2),
)


def matmul_venom(
    a: SparseVenom,
    b: Array,
    *,
    rows: RowOrder | None = None,
    out_dtype: DTypeLike | None = None,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.matmul_venom`; refuses dtypes that are no 16-bit floats, and a v that is no multiple of 64.

    A pass of its own puts rows back into the order of the tokens.
    """
    tiling = config or largest_that_occupies(CANDIDATES, a.shape[0], b.shape[1], block_m=a.v)
    options = dict(out_dtype=out_dtype, tiling=tiling, lists="b", v=a.v)
    return combine(multiply("matmul_venom", a, b, a.shape[0], neuron_ids=a.columns, **options), rows)
