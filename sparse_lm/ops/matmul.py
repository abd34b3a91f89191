"""Compressed sparse matrices times dense ones. Products accumulate in float32."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from sparse_lm.ops import backends
from sparse_lm.ops.checks import check_contraction, check_float, check_format, check_ids, check_matrix, described
from sparse_lm.ops.formats import Sparse24, SparseVenom
from sparse_lm.ops.row_order import RowOrder


def matmul_24(
    w: Float[Sparse24, "rows contracted"],
    b: Float[Array, "contracted columns"],
    *,
    out_transposed: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "_ _"]:
    """Computes w @ b.

    Args:
      b: in the dtype of w. Kernels take bfloat16 and float16, and refuse others and mixed ones; the reference
        takes any. Kernels read no row of b for a pruned position: an inf or NaN there does not reach the result, unlike
        in `w.to_dense() @ b`.
      out_transposed: give the transpose of the result, without another pass over memory.
    """
    _check_operands("w", w, Sparse24, "b", b, out_dtype)
    return backends.dispatch(
        "matmul_24", implementation, w, b, out_transposed=out_transposed, out_dtype=out_dtype or b.dtype
    )


def matmul_24_fp8(
    a: Float[Sparse24, "rows contracted"],
    b_t: Float[Array, "columns contracted"],
    scale: Float[Array, "rows 1"],
    columns: Float[Array, "1 columns"] | None = None,
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    implementation: str | None = None,
) -> Float[Array, "rows columns"]:
    """Computes scale * (a @ b_t^T) * columns of operands in e4m3 (2209.05433), stored along the contracted dimension.

    The product is rounded to the result's dtype before it is scaled, which loses nothing if scales are powers of two.

    Args:
      scale: f32, of the rows of a times what b_t has as a whole.
      columns: f32, of the rows of b_t, where they have scales of their own.
      out_dtype: of the result. The kernel gives bfloat16 and float32, for a contracted dimension that is a multiple of
        128, and refuses others; the reference takes any.
    """
    _check_operands("a", a, Sparse24, "b_t", b_t, out_dtype, transposed=True)
    for name, operand in (("a", a), ("b_t", b_t)):
        if operand.dtype != jnp.float8_e4m3fn:
            raise ValueError(f"{name} is {operand.dtype}: must be float8_e4m3fn")
    for name, factors, shape in (("scale", scale, (a.shape[0], 1)), ("columns", columns, (1, b_t.shape[0]))):
        if name == "scale" or factors is not None:
            check_matrix(name, factors)
            if (factors.shape, factors.dtype) != (shape, jnp.float32):
                raise ValueError(f"{name} must be float32{[*shape]} for these operands; got {described(factors)}")
    return backends.dispatch("matmul_24_fp8", implementation, a, b_t, scale, columns, out_dtype=out_dtype)


def matmul_venom(
    a: Float[SparseVenom, "slots F"],
    b: Float[Array, "F D"],
    *,
    rows: RowOrder | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "_ D"]:
    """Computes a @ b; of b, each block of rows of a reads only the rows that it keeps.

    Args:
      b: in the dtype of a, as in `matmul_24`.
      rows: the order of the tokens that a's rows are in. The result's are put back into the tokens' own, as
        `row_order.combine` does, without a pass over memory where the kernel stores them there. Not by default.
    """
    _check_operands("a", a, SparseVenom, "b", b, out_dtype)
    check_ids("a.columns", a.columns)
    if not isinstance(rows, RowOrder | None):
        raise TypeError(f"rows must be a RowOrder; got {described(rows)}")
    if rows is not None and rows.slots.shape != a.shape[:1]:
        raise ValueError(f"rows order {rows.slots.shape[0]} slots, not the {a.shape[0]} rows of a")
    return backends.dispatch("matmul_venom", implementation, a, b, rows=rows, out_dtype=out_dtype or b.dtype)


def sampled_matmul_24(
    w: Float[Sparse24, "F D"],
    x: Float[Array, "T D"],
    neuron_ids: Int32[Array, "blocks S"],
    v: int,
    *,
    contiguous: int = 1,
    squared_relu: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "T S"]:
    """Computes x @ w^T, only at the neurons that each block of v rows of x asks for.

    Args:
      w: one row a neuron.
      neuron_ids: int32 [ceil(T / v), S], neurons; F stands for a neuron of zeros, and where neurons are
        contiguous for so many of them. What other numbers outside of 0..F do is not defined.
      contiguous: how many neurons at a time are consecutive, as in `SparseVenom`.
      squared_relu: give relu(.)^2 of the rounded product, without another pass over memory.

    Returns:
      [T, S]; row t, column j is the pre-activation of neuron `neuron_ids[t // v, j]` for token t, or its square.
    """
    _check_operands("w", w, Sparse24, "x", x, out_dtype, transposed=True)
    _check_neuron_ids(neuron_ids, v, contiguous, "rows of x", x.shape[0])
    options: dict[str, Any] = dict(contiguous=contiguous, squared_relu=squared_relu, out_dtype=out_dtype or x.dtype)
    return backends.dispatch("sampled_matmul_24", implementation, w, x, neuron_ids, v, **options)


def scattered_matmul_24(
    a: Float[Sparse24, "S T"],
    b: Float[Array, "T D"],
    neuron_ids: Int32[Array, "blocks S"],
    v: int,
    rows: int,
    *,
    contiguous: int = 1,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "F D"]:
    """Computes the weight gradient of a sampled product: adds rows of each block's a @ b where its neurons lie.

        out[neuron_ids[t // v, j]] += a[j, t] b[t]

    Args:
      a: 2:4 along T.
      neuron_ids: int32 [ceil(T / v), S], neurons, distinct within a block; `rows` stands for none, and
        where neurons are contiguous for so many of none. What other numbers outside of 0..`rows` do is not defined.
      v: columns of a that share a list.
      rows: F, of the result.
      contiguous: how many neurons at a time are consecutive, as in `SparseVenom`.

    Returns:
      [F, D]; neurons that no block lists have zeros.
    """
    _check_operands("a", a, Sparse24, "b", b, out_dtype)
    _check_neuron_ids(neuron_ids, v, contiguous, "columns of a", a.shape[1])
    if rows < 1:
        raise ValueError(f"rows = {rows} must be positive")
    if neuron_ids.shape[1] != a.shape[0]:
        raise ValueError(
            f"neuron_ids {list(neuron_ids.shape)} must list a neuron for each of the {a.shape[0]} rows of a"
        )
    options = dict(contiguous=contiguous, out_dtype=out_dtype or b.dtype)
    return backends.dispatch("scattered_matmul_24", implementation, a, b, neuron_ids, v, rows, **options)


def _check_operands(
    left: str, a: Any, format: type, right: str, b: Array, out_dtype: DTypeLike | None, *, transposed: bool = False
) -> None:
    """Requires a matrix in a format, a dense one of floats that it can be multiplied with, and a dtype of floats."""
    check_format(left, a, format)
    check_matrix(right, b)
    check_contraction(left, a.shape, *((f"{right}^T", b.shape[::-1]) if transposed else (right, b.shape)))
    check_float("out_dtype", out_dtype)


def _check_neuron_ids(neuron_ids: Array, v: int, contiguous: int, what: str, size: int) -> None:
    if v < 1 or contiguous < 1:
        raise ValueError(f"v = {v} and contiguous = {contiguous} must be positive")
    check_ids("neuron_ids", neuron_ids)
    if neuron_ids.shape[0] != -(-size // v):
        raise ValueError(f"neuron_ids {list(neuron_ids.shape)} must have a row for each {v} of the {size} {what}")
    if neuron_ids.shape[1] % contiguous:
        raise ValueError(f"contiguous = {contiguous} must divide the {neuron_ids.shape[1]} neurons of a block")
