"""Compressed sparse matrices times dense ones. Products accumulate in float32."""

from __future__ import annotations

from jax import Array
from jax.typing import DTypeLike

from sparse_lm.ops import backends
from sparse_lm.ops.formats import Sparse24, SparseVenom


def matmul_24(w: Sparse24, b: Array, *, out_dtype: DTypeLike | None = None, implementation: str | None = None) -> Array:
    """w @ b.

    Args:
      w: 2:4 matrix [M, K].
      b: [K, N].
      out_dtype: of the result; that of b by default.
      implementation: backend that must run this; the best one by default.

    Returns:
      [M, N].

    Raises:
      ValueError: shapes do not match.
      NotImplementedError: the named backend cannot run this.
    """
    _check_contraction("w", w.shape, "b", b.shape)
    return backends.dispatch("matmul_24", implementation, w, b, out_dtype=out_dtype or b.dtype)


def matmul_venom(
    a: SparseVenom, b: Array, *, out_dtype: DTypeLike | None = None, implementation: str | None = None
) -> Array:
    """a @ b; of b, each block of rows of a reads only the rows that it keeps.

    Args:
      a: V:2:M matrix [M, K].
      b: [K, N].
      out_dtype: of the result; that of b by default.
      implementation: backend that must run this; the best one by default.

    Returns:
      [M, N].

    Raises:
      ValueError: shapes do not match.
      NotImplementedError: the named backend cannot run this.
    """
    _check_contraction("a", a.shape, "b", b.shape)
    return backends.dispatch("matmul_venom", implementation, a, b, out_dtype=out_dtype or b.dtype)


def sampled_matmul_24(
    w: Sparse24,
    x: Array,
    columns: Array,
    v: int,
    *,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Array:
    """x @ w^T, only at the neurons that each block of v rows of x asks for.

    Args:
      w: 2:4 matrix [F, D], one row a neuron.
      x: [T, D].
      columns: int32 [ceil(T / v), Fc], neurons; F stands for a neuron of zeros.
      v: rows of a block.
      out_dtype: of the result; that of x by default.
      implementation: backend that must run this; the best one by default.

    Returns:
      [T, Fc]; row t, column j is the pre-activation of neuron `columns[t // v, j]` for token t.

    Raises:
      ValueError: shapes do not match.
      NotImplementedError: the named backend cannot run this.
    """
    _check_contraction("w", w.shape, "x^T", x.shape[::-1])
    if columns.shape[0] != -(-x.shape[0] // v):
        raise ValueError(f"columns {list(columns.shape)} must have a row for each {v} of the {x.shape[0]} rows of x")
    return backends.dispatch("sampled_matmul_24", implementation, w, x, columns, v, out_dtype=out_dtype or x.dtype)


def _check_contraction(left: str, left_shape: tuple[int, ...], right: str, right_shape: tuple[int, ...]) -> None:
    if len(right_shape) != 2 or left_shape[1] != right_shape[0]:
        raise ValueError(f"{left} {list(left_shape)} and {right} {list(right_shape)} cannot be multiplied")
