"""Multiplies a V:2:M matrix by a dense one: the 2:4 product over condensed columns, with gathered rows of B.

All rows of a tile lie in one Venom block, so that a gathered row serves them all. `cp.async` takes an address
from each thread, so that a gathered row costs what any other does. The frame is product.py.

Numerics: as `matmul_24`, in the order of the condensed columns.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_lm.ops.checks import check_product_dtypes
from sparse_lm.ops.formats import SparseVenom
from sparse_lm.ops.row_order import RowOrder, combine
from sparse_lm.ops.triton.frame import product
from sparse_lm.ops.triton.frame.gluon_call import align_rows
from sparse_lm.ops.triton.frame.product import Product, launch
from sparse_lm.ops.triton.frame.tiling import Tiling, largest_in_blocks

# Largest first.
CANDIDATES = (
    Tiling(256, 128, warps_m=4, warps_n=2),
    Tiling(128, 256, warps_m=2, warps_n=4, stages=3),
    Tiling(128, 128, warps_m=2, warps_n=2, stages=3),
    Tiling(64, 128, warps_m=2, warps_n=2),
)


@gluon.jit
def _matmul_venom_kernel(values, metadata, columns, b, out, shape: gl.constexpr):
    product.multiply(values, metadata, columns, b, out, shape)


def matmul_venom(
    a: SparseVenom,
    b: Array,
    *,
    rows: RowOrder | None = None,
    out_dtype: DTypeLike | None = None,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.matmul_venom`. A copy of b is made if its rows are no multiple of 16 bytes.

    Rows of b that no stored position names are not read. A pass of its own puts rows back into the order of the tokens.

    Raises:
      NotImplementedError: the dtypes, or v, which is a multiple of 64.
    """
    out_dtype = jnp.dtype(out_dtype or b.dtype)
    check_product_dtypes(a.dtype, b.dtype, out_dtype)
    (m, k), n = a.shape, b.shape[1]
    config = config or largest_in_blocks(CANDIDATES, m, n, a.v, lambda tiling: tiling.tile_m)
    b = align_rows(b)
    shape = Product(
        m, n, k, rows=a.values.shape[0], steps=a.metadata.shape[1], b_stride=b.shape[1], tiling=config, v=a.v
    )
    out = launch(_matmul_venom_kernel, a.values, a.metadata, a.columns, b, shape=shape, out_dtype=out_dtype)
    return combine(out, rows)
