"""Multiplies a 2:4 matrix by a dense one, with the sparse instruction of a warp. The frame is product.py.

Numerics: float32 accumulation in the order of k; one rounding to the result's dtype. The same bits come out every
time.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_lm.ops.checks import check_product_dtypes
from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.triton.frame import product
from sparse_lm.ops.triton.frame.gluon_call import align_rows
from sparse_lm.ops.triton.frame.product import Product, launch
from sparse_lm.ops.triton.frame.tiling import Tiling, largest_that_occupies

# Largest first.
CANDIDATES = (
    Tiling(256, 128, warps_m=4, warps_n=2, stages=4),
    Tiling(128, 128, warps_m=2, warps_n=2, stages=3),
    Tiling(64, 128, warps_m=2, warps_n=2, stages=3),
    Tiling(64, 64, warps_m=2, warps_n=2, stages=4),
)


@gluon.jit
def _matmul_24_kernel(values, metadata, b, out, shape: gl.constexpr):
    product.multiply(values, metadata, None, b, out, shape)


def matmul_24(
    w: Sparse24,
    b: Array,
    *,
    out_dtype: DTypeLike | None = None,
    out_transposed: bool = False,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.matmul_24`. A copy of b is made if its rows are no multiple of 16 bytes.

    Rows of b at pruned positions are not read: unlike in `w.to_dense() @ b`, an inf or nan there does not reach the
    result.

    Raises:
      NotImplementedError: the dtypes.
    """
    out_dtype = jnp.dtype(out_dtype or b.dtype)
    check_product_dtypes(w.dtype, b.dtype, out_dtype)
    (m, k), n = w.shape, b.shape[1]
    config = config or largest_that_occupies(CANDIDATES, m, n)
    b = align_rows(b)
    shape = Product(
        m,
        n,
        k,
        rows=w.values.shape[0],
        steps=w.metadata.shape[1],
        b_stride=b.shape[1],
        tiling=config,
        out_transposed=out_transposed,
    )
    return launch(_matmul_24_kernel, w.values, w.metadata, b, shape=shape, out_dtype=out_dtype)
