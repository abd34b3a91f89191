"""Listed rows of a 2:4 matrix times the rows of a dense one, block by block.

All tokens of a tile lie in one block. A listed row's values are copied like any other's; its metadata is half of a
word, so that two words are copied for each that the instruction reads, and their halves put together. The frame is
product.py; the result is transposed in it.

Numerics: as `matmul_24`.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_lm.ops.formats import TILE, Sparse24
from sparse_lm.ops.triton import product
from sparse_lm.ops.triton.gluon_call import align_rows, gluon_call
from sparse_lm.ops.triton.matmul_24 import check_dtypes
from sparse_lm.ops.triton.product import Product, Tiling, largest_that_occupies


@dataclasses.dataclass(frozen=True)
class Config(Tiling):
    """How the product is cut up; M counts listed rows, N tokens. tile_n divides v."""


# Largest first.
CANDIDATES = (
    Config(128, 128, warps_m=2, warps_n=4, stages=3),
    Config(128, 64, warps_m=2, warps_n=2, stages=3),
    Config(64, 64, warps_m=2, warps_n=2, stages=4),
)


@gluon.jit
def _sampled_matmul_24_kernel(values, metadata, columns, x, out, shape: gl.constexpr):
    product.multiply(values, metadata, columns, x, out, shape)


def sampled_matmul_24(
    w: Sparse24,
    x: Array,
    columns: Array,
    v: int,
    *,
    run: int = 1,
    out_dtype: DTypeLike | None = None,
    config: Config | None = None,
) -> Array:
    """x @ w[columns of the block].T, for each block of v rows of x.

    Args:
      w: 2:4 matrix [F, D], bfloat16 or float16.
      x: [T, D] in the dtype of w. A copy is made if rows are no multiple of 16 bytes.
      columns: int32 [ceil(T / v), Kc], rows of w; if `run` is 1, F stands for a row of zeros.
      v: rows of a block, a multiple of 64.
      run: that many columns are consecutive, which does not matter here.
      out_dtype: bfloat16, float16 or float32; that of x by default.
      config: tiling.

    Returns:
      [T, Kc].

    Raises:
      NotImplementedError: the dtypes, or v.
    """
    del run
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    check_dtypes(w.dtype, x.dtype, out_dtype)
    (tokens, dim), kept = x.shape, columns.shape[1]
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
    return gluon_call(
        _sampled_matmul_24_kernel,
        w.values,
        w.metadata,
        columns,
        x,
        out=jax.ShapeDtypeStruct((tokens, kept), out_dtype),
        blocks=math.prod(shape.grid),
        warps=config.warps,
        constants=dict(shape=shape),
    )


def heuristic_config(kept: int, tokens: int, v: int) -> Config:
    """The largest tile, of those whose tokens lie in one block, that occupies this GPU.

    Raises:
      NotImplementedError: there is none.
    """
    fitting = [config for config in CANDIDATES if v % config.tile_n == 0]
    if not fitting:
        raise NotImplementedError(f"needs v to be a multiple of {TILE}, not {v}")
    return largest_that_occupies(fitting, kept, tokens)
