"""Dense products in FP8: e4m3 (2209.05433) times e4m3, summed in float32.

    Y [T, N] = X [T, K] W [K, N]        X has a scale a row, W has one
    A^T B                               A [T, M] has a scale a row, B [T, N] one a column

A row's scale follows from that row alone, so that no token's result depends on another token. Scales are powers of
two: to divide by one rounds nothing, and to multiply the result by it rounds nothing. Products of the second kind are
weight gradients, which sum over tokens. There the scales of A's rows go over to B before it is rounded, so that A is
the same in both kinds of products.

The program is the same everywhere, a product of e4m3 operands. On GPUs that have FP8, XLA takes a product of cuBLAS for
it if it is compiled with `COMPILER_OPTIONS`; elsewhere it converts the operands, which emulates that.

cuBLAS reads both operands along the dimension that it sums over. So A of the second kind is brought to e4m3 transposed,
too, which a backend may do in one pass over memory (`rows_both_ways`, `squared_relu`, `squared_relu_gradients`).

A may be 2:4 (`times_24`, `sum_over_rows_24`). Then A and its transpose, 2:4 along tokens, keep different numbers, so
each has scales of its own rows: A^T has a scale a neuron, and none goes over to B. Hopper's kernel leaves the sums in
the tensor cores, in both kinds of products.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float

from sparse_lm.ops import backends
from sparse_lm.ops.formats import HiddenStats, Sparse24
from sparse_lm.ops.matmul import matmul_24_fp8

PRECISION = "fp8"  # what `ModelConfig.precision` calls it
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""Options of `jax.jit`, without which XLA may compile Triton kernels in place of cuBLAS's. They multiply the same
numbers: generation and the evaluation harness, which few tokens or the unembedding limit, do without the options."""
E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0  # of e4m3
LOWEST_EXPONENT = -100  # of a scale, so that its reciprocal is a number, too


def unavailable() -> str | None:
    """Says why the device has no FP8 products; None if it has them, or is a CPU, which emulates them."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return None
    kind, capability = device.device_kind, device.compute_capability  # "gfx942" and the like on other GPUs
    if kind.startswith("NVIDIA") and tuple(map(int, capability.split("."))) >= (8, 9):
        return None
    return f"needs an NVIDIA GPU of compute capability 8.9 or more; {kind} has {capability}"


class Scaled(NamedTuple):
    """Numbers in e4m3, and what they are to be multiplied by."""

    values: Array  # [M, N]
    scale: Array  # f32[M, 1] of rows, f32[1, N] of columns, f32[1, 1] of a whole matrix

    @property
    def T(self) -> Scaled:
        """Returns A^T of A: scales of rows are those of its columns."""
        return Scaled(self.values.T, self.scale.T)


class Unscaled(NamedTuple):
    """A product of e4m3 operands, and what its rows are to be multiplied by."""

    values: Array  # [T, N]
    factor: Array  # [T, 1] in the same dtype

    def scaled(self) -> Array:
        return self.values * self.factor


@jax.named_call
def by_rows(x: Float[Array, "M N"]) -> Scaled:
    """Brings each row to e4m3 with a scale of its own."""
    return _scaled(x, jnp.max(jnp.abs(x), axis=1, keepdims=True))


@jax.named_call
def by_columns(x: Float[Array, "M N"]) -> Scaled:
    """Brings each column to e4m3 with a scale of its own."""
    return _scaled(x, jnp.max(jnp.abs(x), axis=0, keepdims=True))


@jax.named_call
def whole(w: Float[Array, "M N"]) -> Scaled:
    """Brings a matrix to e4m3 with one scale."""
    return _scaled(w, jnp.max(jnp.abs(w), keepdims=True))


def _scaled(x: Array, largest: Array) -> Scaled:
    """Divides by the power of two that brings `largest` to 224 or more, and less than 448.

    Where `largest` is infinite or NaN the scale is NaN, and with it all that is computed from these numbers: nothing
    saturates silently. No scale is below 2^-100, so that numbers below 2^-110 become 0.

    That is also the scale of zeros alone. A larger one would multiply, in `sum_over_rows`, the other operand's row of a
    token that adds nothing to the sum, and that row would set the scale of all.
    """
    if x.dtype == jnp.float16:
        raise ValueError("FP8 takes bfloat16 or float32, whose range its sums and scales need, not float16")
    _, exponent = jnp.frexp(largest.astype(jnp.float32) / LARGEST)
    exponent = jnp.where(largest == 0, LOWEST_EXPONENT, jnp.maximum(exponent, LOWEST_EXPONENT))
    scale = jnp.where(jnp.isfinite(largest), jnp.ldexp(jnp.float32(1), exponent), jnp.nan)
    return Scaled((x * (1 / scale).astype(x.dtype)).astype(E4M3), scale)


@jax.named_call
def rows_both_ways(x: Float[Array, "T N"]) -> tuple[Scaled, Scaled]:
    """Brings each row to e4m3 with a scale of its own; returns that and its transpose [N, T]."""
    return backends.dispatch("fp8_rows", None, x)


@jax.named_call
def squared_relu(h: Unscaled) -> tuple[tuple[Scaled, Scaled], HiddenStats]:
    """Brings relu(H)^2 to e4m3 by rows, as `rows_both_ways`; returns with it what is seen of it."""
    return backends.dispatch("fp8_squared_relu", None, h)


@jax.named_call
def squared_relu_gradients(dy: Unscaled, h: Unscaled) -> tuple[Scaled, Scaled]:
    """Brings dH of dY and H to e4m3 by rows, as `rows_both_ways`: 2 sqrt(Y) dY with Y = relu(H)^2."""
    return backends.dispatch("fp8_squared_relu_gradients", None, dy, h)


def times(rows: Scaled, w: Float[Array, "K N"]) -> Float[Array, "T N"]:
    """Computes X W in the dtype of w, X in e4m3 and scaled by rows; brings w to e4m3 as a whole. Not differentiable."""
    return product(rows, w).scaled()


@functools.partial(jax.named_call, name="times")
def product(rows: Scaled, w: Float[Array, "K N"]) -> Unscaled:
    """Computes `times`, but for the scales."""
    matrix = whole(w)
    # The operands are e4m3 itself: where they are converted first, XLA may leave out the rounding with the conversion.
    values = jnp.matmul(rows.values, matrix.values, preferred_element_type=w.dtype)
    return Unscaled(values, (rows.scale * matrix.scale).astype(w.dtype))


@jax.named_call
def sum_over_rows(transposed: Scaled, b: Float[Array, "T N"], dtype: DTypeLike) -> Float[Array, "M N"]:
    """Computes A^T B, A^T in e4m3 and scaled by columns; brings b to e4m3 by columns. It is not differentiable."""
    columns = by_columns(b * transposed.scale.T.astype(b.dtype))
    # By default sums stay in the tensor cores, which keep some 14 bits of them: too few for as many summands as tokens.
    precision = lax.Precision.HIGHEST
    summed = jnp.matmul(transposed.values, columns.values, precision=precision, preferred_element_type=dtype)
    return summed * columns.scale.astype(dtype)


@jax.named_call
def times_24(
    a: Float[Sparse24, "M K"], w: Float[Array, "K N"], *, implementation: str | None = None
) -> Float[Array, "M N"]:
    """Computes A W in the dtype of w, A 2:4; brings A to e4m3 by rows, and w as a whole.

    It is not differentiable. `implementation` and what is raised are those of `matmul_24_fp8`.
    """
    (a, scale), matrix = _by_rows_24(a), whole(w)
    scale *= matrix.scale
    return matmul_24_fp8(a, matrix.values.T, scale, out_dtype=w.dtype, implementation=implementation)


@jax.named_call
def sum_over_rows_24(
    transposed: Float[Sparse24, "M T"],
    b: Float[Array, "T N"],
    *,
    out_dtype: DTypeLike,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """Computes A^T B in a dtype, A^T 2:4 along T; brings A^T to e4m3 by its rows, and b by columns.

    It is not differentiable. `implementation` and what is raised are those of `matmul_24_fp8`.
    """
    (a_t, scale), columns = _by_rows_24(transposed), by_columns(b)
    options: dict[str, Any] = dict(out_dtype=out_dtype, implementation=implementation)
    return matmul_24_fp8(a_t, columns.values.T, scale, columns.scale, **options)


def _by_rows_24(a: Sparse24) -> tuple[Sparse24, Array]:
    """Brings each row of a 2:4 matrix to e4m3; returns that and its scales f32[M, 1]."""
    rows = by_rows(a.values)
    return dataclasses.replace(a, values=rows.values), rows.scale[: a.shape[0]]


@jax.custom_vjp
def linear(x: Float[Array, "*tokens K"], w: Float[Array, "N K"]) -> Float[Array, "*tokens N"]:
    """Computes x W^T in the dtype of w; all leading axes of x are tokens. Differentiable in reverse mode."""
    return _linear_forward(x, w)[0]


def _linear_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    # A call of `linear` here would hide the product from rematerialisation policies.
    return times(by_rows(_tokens(x)), w.T).reshape(*x.shape[:-1], w.shape[0]), (x, w)


def _linear_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = saved
    rows, transposed = rows_both_ways(_tokens(dy))
    return times(rows, w).reshape(x.shape).astype(x.dtype), sum_over_rows(transposed, _tokens(x), w.dtype)


linear.defvjp(_linear_forward, _linear_backward)


def _tokens(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])
