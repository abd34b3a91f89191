"""Multiplies listed rows of a 2:4 matrix by the rows of a dense one, block by block.

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

from sparse_lm.ops.checks import check_product_dtypes
from sparse_lm.ops.formats import HiddenStats, Sparse24
from sparse_lm.ops.triton.frame import product
from sparse_lm.ops.triton.frame.gluon_call import align_rows
from sparse_lm.ops.triton.frame.product import Product, launch
from sparse_lm.ops.triton.frame.tiling import Tiling, largest_in_blocks
from sparse_lm.ops.triton.passes.sparsify_24 import squared_relu_24

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
    """See `sparse_lm.ops.sampled_matmul_24`. A copy of x is made if its rows are no multiple of 16 bytes.

    It does not matter whether neurons are contiguous.

    Raises:
      NotImplementedError: the dtypes, or v, which is a multiple of 64.
    """
    del contiguous
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    check_product_dtypes(w.dtype, x.dtype, out_dtype)
    (tokens, dim), kept = x.shape, neuron_ids.shape[1]
    config = config or largest_in_blocks(CANDIDATES, kept, tokens, v, lambda tiling: tiling.tile_n)
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


def sampled_squared_relu_24(
    w: Sparse24, x: Array, neuron_ids: Array, v: int, *, contiguous: int = 1
) -> tuple[Sparse24, HiddenStats]:
    """See `sparse_lm.ops.sampled_squared_relu_24`.

    Raises:
      NotImplementedError: the dtypes, or v.
    """
    return squared_relu_24(sampled_matmul_24(w, x, neuron_ids, v, contiguous=contiguous))
