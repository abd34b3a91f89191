"""V:2:M matrix times dense matrix: the 2:4 product over condensed columns, with gathered rows of B.

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

from sparse_lm.ops.formats import TILE, SparseVenom
from sparse_lm.ops.kernel_dtypes import check_product_dtypes
from sparse_lm.ops.row_order import RowOrder, combine
from sparse_lm.ops.triton.frame import product, tuning
from sparse_lm.ops.triton.frame.gluon_call import align_rows
from sparse_lm.ops.triton.frame.product import Product, Tiling, largest_that_occupies, launch

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
    """See `sparse_lm.ops.matmul_venom`. Rows of b that no stored position names are not read.

    Args:
      a: bfloat16 or float16, v a multiple of 64.
      b: in the dtype of a. A copy is made if rows are no multiple of 16 bytes.
      rows: the order of a's rows, from which a pass of its own puts those of the result back into the tokens'.
      out_dtype: bfloat16, float16 or float32; that of b by default.
      config: tiling whose tile_m divides v; by default the tuned one for the shape and device, or else
        `heuristic_config`.

    Raises:
      NotImplementedError: the dtypes, or v.
    """
    out_dtype = jnp.dtype(out_dtype or b.dtype)
    check_product_dtypes(a.dtype, b.dtype, out_dtype)
    (m, k), n = a.shape, b.shape[1]
    # The neurons of one layer: b may be that of all layers, of which a lists one's.
    neurons = a.columns.shape[1] * a.m // 4
    config = config or tuning.lookup("matmul_venom", (m, n, neurons, a.v, a.m), Tiling) or heuristic_config(m, n, a.v)
    b = align_rows(b)
    shape = Product(
        m, n, k, rows=a.values.shape[0], steps=a.metadata.shape[1], b_stride=b.shape[1], tiling=config, v=a.v
    )
    out = launch(_matmul_venom_kernel, a.values, a.metadata, a.columns, b, shape=shape, out_dtype=out_dtype)
    return out if rows is None else combine(out, rows)


def heuristic_config(m: int, n: int, v: int) -> Tiling:
    """Chooses the largest tile, of those whose rows lie in one block, that occupies this GPU.

    Raises:
      NotImplementedError: there is none.
    """
    fitting = [config for config in CANDIDATES if v % config.tile_m == 0]
    if not fitting:
        raise NotImplementedError(f"needs v to be a multiple of {TILE}, not {v}")
    return largest_that_occupies(fitting, m, n)
