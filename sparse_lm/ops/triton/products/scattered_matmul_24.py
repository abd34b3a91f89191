"""Multiplies a 2:4 matrix by a dense one, block by block along k, each added to the rows that it lists.

The rows come in slices of contiguous ones, and a tile of the result lies in one slice. So its sum runs over the blocks
that list the slice, wherever in their list it stands: a thread block reads from a table which blocks and where. How
many there are is known at run time only; the tiles with most to do start first.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from sparse_lm.ops.checks import check_multiples
from sparse_lm.ops.formats import TILE, Sparse24
from sparse_lm.ops.row_order import inverted_index
from sparse_lm.ops.triton.frame.product import multiply
from sparse_lm.ops.triton.frame.tiling import Tiling, largest_that_occupies
from sparse_lm.ops.triton.products.matmul_24 import CANDIDATES


def scattered_matmul_24(
    a: Sparse24,
    b: Array,
    neuron_ids: Array,
    v: int,
    rows: int,
    *,
    contiguous: int = 1,
    out_dtype: DTypeLike | None = None,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.scattered_matmul_24`; slices past the last row are left out.

    It refuses dtypes that are no 16-bit floats, a `contiguous` or v that is no multiple of 64, and a `contiguous` that
    does not divide `rows`.
    """
    check_multiples({"v": (v, TILE), "contiguous": (contiguous, TILE), "rows": (rows, contiguous)})
    tiling = config or largest_that_occupies(CANDIDATES, rows, b.shape[1], block_m=contiguous)
    places, counts = inverted_index(neuron_ids[:, ::contiguous] // contiguous, rows // contiguous)
    tiles = contiguous // tiling.tile_m
    order = jnp.argsort(-counts)[:, None] * tiles + jnp.arange(tiles)
    return multiply(
        "scattered_matmul_24",
        a,
        b,
        rows,
        tables=(places, counts, order.astype(jnp.int32)),
        out_dtype=out_dtype,
        tiling=tiling,
        lists="out",
        v=v,
        contiguous=contiguous,
        places=places.shape[1],
    )
