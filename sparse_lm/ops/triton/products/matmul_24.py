"""Multiplies a 2:4 matrix by a dense one."""

from __future__ import annotations

from jax import Array
from jax.typing import DTypeLike

from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.triton.frame.product import multiply
from sparse_lm.ops.triton.frame.tiling import Tiling, largest_that_occupies

# Largest first.
CANDIDATES = (
    Tiling(256, 128, warps_m=4, warps_n=2, stages=4),
    Tiling(128, 128, warps_m=2, warps_n=2, stages=3),
    Tiling(64, 128, warps_m=2, warps_n=2, stages=3),
    Tiling(64, 64, warps_m=2, warps_n=2, stages=4),
)


def matmul_24(
    w: Sparse24,
    b: Array,
    *,
    out_dtype: DTypeLike | None = None,
    out_transposed: bool = False,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.matmul_24`; refuses dtypes that are no 16-bit floats."""
    tiling = config or largest_that_occupies(CANDIDATES, w.shape[0], b.shape[1])
    return multiply("matmul_24", w, b, w.shape[0], out_dtype=out_dtype, tiling=tiling, out_transposed=out_transposed)
