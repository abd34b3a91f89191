"""The products with a 2:4 operand: what each asks of the kernel in frame/product.py, and its tilings.

Of products with lists, all rows of a Venom matrix in a tile, or all tokens, lie in one block, and so share its list.
`cp.async` takes an address from each thread, so that a gathered row costs what any other does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from sparse_lm.ops.checks import check_multiples
from sparse_lm.ops.formats import TILE, Sparse24, SparseVenom
from sparse_lm.ops.row_order import RowOrder, combine, inverted_index
from sparse_lm.ops.triton.frame.product import multiply
from sparse_lm.ops.triton.frame.tiling import Tiling, largest_that_occupies

_OF_24 = (
    Tiling(256, 128, warps_m=4, warps_n=2, stages=4),
    Tiling(128, 128, warps_m=2, warps_n=2, stages=3),
    Tiling(64, 128, warps_m=2, warps_n=2, stages=3),
    Tiling(64, 64, warps_m=2, warps_n=2, stages=4),
)
# Of each product, the largest first.
CANDIDATES = {
    "matmul_24": _OF_24,
    "matmul_venom": (
        Tiling(256, 128, warps_m=4, warps_n=2),
        Tiling(128, 256, warps_m=2, warps_n=4, stages=3),
        Tiling(128, 128, warps_m=2, warps_n=2, stages=3),
        Tiling(64, 128, warps_m=2, warps_n=2),
    ),
    "sampled_matmul_24": (  # M counts listed rows, N tokens
        Tiling(128, 128, warps_m=2, warps_n=4, stages=3),
        Tiling(128, 64, warps_m=2, warps_n=2, stages=3),
        Tiling(64, 64, warps_m=2, warps_n=2, stages=4),
    ),
    "scattered_matmul_24": _OF_24,
}


def matmul_24(
    w: Sparse24,
    b: Array,
    *,
    out_dtype: DTypeLike | None = None,
    out_transposed: bool = False,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.matmul_24`; refuses dtypes that are no 16-bit floats."""
    tiling = config or largest_that_occupies(CANDIDATES["matmul_24"], w.shape[0], b.shape[1])
    return multiply("matmul_24", w, b, w.shape[0], out_dtype=out_dtype, tiling=tiling, out_transposed=out_transposed)


def matmul_venom(
    a: SparseVenom,
    b: Array,
    *,
    rows: RowOrder | None = None,
    out_dtype: DTypeLike | None = None,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.matmul_venom`; refuses dtypes that are no 16-bit floats, and a v that is no multiple of 64.

    It is the 2:4 product over condensed columns, with gathered rows of b. A pass of its own puts rows back into the
    order of the tokens.
    """
    tiling = config or largest_that_occupies(CANDIDATES["matmul_venom"], a.shape[0], b.shape[1], block_m=a.v)
    options = dict(out_dtype=out_dtype, tiling=tiling, lists="b", v=a.v)
    return combine(multiply("matmul_venom", a, b, a.shape[0], neuron_ids=a.columns, **options), rows)


def sampled_matmul_24(
    w: Sparse24,
    x: Array,
    neuron_ids: Array,
    v: int,
    *,
    contiguous: int = 1,
    squared_relu: bool = False,
    out_dtype: DTypeLike | None = None,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.sampled_matmul_24`; refuses all but 16-bit floats, and a v that is no multiple of 64.

    A listed row's values are copied like any other's; its metadata is half of a word, so that two words are copied for
    each that the instruction reads, and their halves put together.
    """
    del contiguous  # neurons are gathered one by one
    kept = neuron_ids.shape[1]
    tiling = config or largest_that_occupies(CANDIDATES["sampled_matmul_24"], kept, x.shape[0], block_n=v)
    options = dict(tiling=tiling, out_dtype=out_dtype, b_transposed=True, out_transposed=True, lists="a", v=v)
    h = multiply("sampled_matmul_24", w, x, kept, neuron_ids=neuron_ids, **options)
    return jnp.square(jax.nn.relu(h)) if squared_relu else h


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

    It refuses dtypes that are no 16-bit floats, a `contiguous` or v that is no multiple of 64, a `contiguous` that does
    not divide `rows`, and a `config` whose tiles do not lie in one slice.

    A tile of the result lies in one slice, and its sum is over the blocks that list it, as in `hopper`. The tiles with
    most to do start first.
    """
    check_multiples({"v": (v, TILE), "contiguous": (contiguous, TILE), "rows": (rows, contiguous)})
    tiling = config or largest_that_occupies(CANDIDATES["scattered_matmul_24"], rows, b.shape[1], block_m=contiguous)
    check_multiples({"contiguous": (contiguous, tiling.tile_m)})
    places, counts = inverted_index(neuron_ids[:, ::contiguous] // contiguous, rows // contiguous)
    tiles = contiguous // tiling.tile_m
    order = jnp.argsort(-counts)[:, None] * tiles + jnp.arange(tiles)
    tables, width = (places, counts, order.astype(jnp.int32)), places.shape[1]
    options = dict(out_dtype=out_dtype, tiling=tiling, lists="out", v=v, contiguous=contiguous, places=width)
    return multiply("scattered_matmul_24", a, b, rows, tables=tables, **options)
