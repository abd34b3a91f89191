"""Listed rows of a 2:4 matrix times the rows of a dense one, block by block.

All tokens of a tile lie in one block. A listed row's values are copied like any other's; its metadata is half of a
word, so that two words are copied for each that the instruction reads, and their halves put together. The frame is
product.py; the result is transposed in it.

Numerics: as `matmul_24`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_lm.ops.formats import TILE, Sparse24
from sparse_lm.ops.kernel_dtypes import check_product_dtypes
from sparse_lm.ops.triton.frame import product
from sparse_lm.ops.triton.frame.gluon_call import align_rows
from sparse_lm.ops.triton.frame.product import Product, Tiling, largest_that_occupies, launch

# Largest first. M counts listed rows, N tokens.
CANDIDATES = (
    Tiling(128, 128, warps_m=2, warps_n=4, stages=3),
    Tiling(128, 64, warps_m=2, warps_n=2, stages=3),
    Tiling(64, 64, warps_m=2, warps_n=2, stages=4),
)


@gluon.jit
def _sampled_matmul_24_kernel(values, metadata, neuron_ids, x, out, shape: gl.constexpr):
    product.multiply(values, metadata, neuron_ids, x, out, shape)


def sampled_matmul_24(
    w: Sparse24,
    x: Array,
    neuron_ids: Array,
    v: int,
    *,
    contiguous: int = 1,
    out_dtype: DTypeLike | None = None,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.sampled_matmul_24`.

    Args:
      w: bfloat16 or float16.
      x: in the dtype of w. A copy is made if rows are no multiple of 16 bytes.
      neuron_ids: rows of w in any order, contiguous or not.
      v: a multiple of 64.
      contiguous: does not matter here.
      out_dtype: bfloat16, float16 or float32; that of x by default.
      config: tiling whose tile_n divides v; `heuristic_config` by default.

    Raises:
      NotImplementedError: the dtypes, or v.
    """
    del contiguous
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    check_product_dtypes(w.dtype, x.dtype, out_dtype)
    (tokens, dim), kept = x.shape, neuron_ids.shape[1]
    config = config or heuristic_config(kept, tokens, v)
    x = align_rows(x)
    shape = Product(
        kept,
        tokens,
        dim,
        rows=w.values.shape[0],
        steps=w.metadata.shape[1],
        b_stride=x.shape[1],
        tiling=config,
        b_transposed=True,
        out_transposed=True,
        v=v,
        sampled=True,
    )
    return launch(_sampled_matmul_24_kernel, w.values, w.metadata, neuron_ids, x, shape=shape, out_dtype=out_dtype)


def heuristic_config(kept: int, tokens: int, v: int) -> Tiling:
    """Chooses the largest tile, of those whose tokens lie in one block, that occupies this GPU.

    Raises:
      NotImplementedError: there is none.
    """
    fitting = [config for config in CANDIDATES if v % config.tile_n == 0]
    if not fitting:
        raise NotImplementedError(f"needs v to be a multiple of {TILE}, not {v}")
    return largest_that_occupies(fitting, kept, tokens)
