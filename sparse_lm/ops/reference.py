"""The specification: each op in plain XLA, on any device. Backends are tested against this.

Products accumulate in float32 and round once. Where a block of rows shares its columns, only those
rows of the other operand are read, so that the work shrinks with the density on a CPU too.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from sparse_lm.ops.columns import venom_columns
from sparse_lm.ops.compress import compress_venom, condense, pack_24, pad_to_tiles
from sparse_lm.ops.formats import Sparse24, SparseVenom
from sparse_lm.ops.mvue import sample_two
from sparse_lm.ops.select import magnitude_rank, soft_threshold, split_groups, top_two

_GATHERED_ELEMENTS = 2**20  # gathered rows that exist at one time: what a CPU's caches hold


def sparsify_24(x: Array, method: str, axis: int, *, scale: ArrayLike, dtype: DTypeLike, key: Array | None) -> Sparse24:
    """See `sparse_lm.ops.sparsify_24`."""
    members = split_groups(pad_to_tiles(x.astype(jnp.float32)), axis)
    if method == "mvue":
        first, second, members = sample_two(members, key)
    else:
        first, second = top_two([magnitude_rank(member) for member in members])
    if method == "soft_threshold":
        members = soft_threshold(members)
    return pack_24(members, first, second, axis=axis, shape=x.shape, scale=scale, dtype=dtype)


def sparsify_venom(x: Array, v: int, m: int, *, columns: str, dtype: DTypeLike) -> SparseVenom:
    """See `sparse_lm.ops.sparsify_venom`."""
    kept = venom_columns(x, v, m, columns)
    return compress_venom(condense(x, kept, v), kept, x.shape, v, m, dtype=dtype)


def matmul_24(w: Sparse24, b: Array, *, out_dtype: DTypeLike) -> Array:
    """See `sparse_lm.ops.matmul_24`."""
    return _dot(w.to_dense(), b).astype(out_dtype)


def matmul_venom(a: SparseVenom, b: Array, *, out_dtype: DTypeLike) -> Array:
    """See `sparse_lm.ops.matmul_venom`."""
    condensed = a.condensed()
    columns = a.columns[:, : condensed.shape[1]]

    def product(block: Array, rows: Array) -> Array:
        return _dot(block, _rows(b, rows)).astype(out_dtype)

    return _map_blocks(product, condensed, columns, a.v, width=b.shape[1])


def sampled_matmul_24(w: Sparse24, x: Array, columns: Array, v: int, *, out_dtype: DTypeLike) -> Array:
    """See `sparse_lm.ops.sampled_matmul_24`."""
    weights = w.to_dense()

    def product(block: Array, neurons: Array) -> Array:
        return _dot(block, _rows(weights, neurons).T).astype(out_dtype)

    return _map_blocks(product, x, columns, v, width=x.shape[1])


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _rows(x: Array, rows: Array) -> Array:
    """Rows of x; one past the last is a row of zeros."""
    return jnp.take(x, rows, axis=0, mode="fill", fill_value=0)


def _map_blocks(product: Callable[[Array, Array], Array], x: Array, columns: Array, v: int, width: int) -> Array:
    """`product(block, columns of the block)` for each v rows of x; results one under the other.

    As many blocks at a time as keep the gathered rows, `width` wide, under a fixed size.
    """
    rows = x.shape[0]
    blocks = jnp.pad(x, ((0, -rows % v), (0, 0))).reshape(-1, v, x.shape[1])
    at_a_time = max(1, _GATHERED_ELEMENTS // (columns.shape[1] * width))
    columns = columns[: blocks.shape[0]]
    if blocks.shape[0] <= at_a_time:
        products = jax.vmap(product)(blocks, columns)
    else:
        products = lax.map(lambda operands: product(*operands), (blocks, columns), batch_size=at_a_time)
    return products.reshape(-1, products.shape[-1])[:rows]
