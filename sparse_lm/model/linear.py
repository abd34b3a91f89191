"""Linear layers without bias, in the precision of the model; and one that is exact."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from sparse_lm.ops import fp8
from sparse_lm.ops.dense import unfused_product

_PARTS = 3  # of a float32 number, in bfloat16
SCALED = "scaled_product"  # what rematerialisation policies call a product in FP8, its scales applied


def linear(x: Array, weights: Sequence[Array], precision: str) -> list[Array]:
    """Computes x W^T of each weight in the dtype of x: [..., inputs] and [outputs, inputs] -> [..., outputs].

    FP8 makes one product of all, so that numbers are brought to e4m3 once, and with one scale for all weights.
    """
    if precision != fp8.PRECISION:
        return _products(x, weights)
    results = jnp.split(fp8.linear(x, jnp.concatenate(weights)), _ends(weights), axis=-1)
    return [checkpoint_name(result, SCALED) for result in results]


@jax.custom_vjp
def _products(x: Array, weights: Sequence[Array]) -> list[Array]:
    return _forward(x, weights)[0]


def _forward(x: Array, weights: Sequence[Array]) -> tuple[list[Array], tuple[Array, Sequence[Array]]]:
    # A call of `_products` here would hide the products from rematerialisation policies.
    return [unfused_product(x, w.T) for w in weights], (x, weights)


def _backward(saved: tuple[Array, Sequence[Array]], gradients: Sequence[Array]) -> tuple[Array, Sequence[Array]]:
    """Computes one product for x and one for all weights.

    With one for each weight, what x gets would be summed in a pass over memory of its own: XLA lets cuBLAS add one
    product to another only where it does not compare cuBLAS with kernels of Triton.
    """
    x, weights = saved
    # The pass that makes the gradients writes them side by side. Without the barrier a product may read them apart, so
    # that they are written twice.
    gradient = lax.optimization_barrier(jnp.concatenate(gradients, axis=-1))
    of_weights = jnp.einsum("...n,...k->nk", gradient, x)
    return gradient @ jnp.concatenate(weights), jnp.split(of_weights, _ends(weights))


_products.defvjp(_forward, _backward)


def _ends(weights: Sequence[Array]) -> list[int]:
    """Lists where the outputs of each weight but the last end."""
    return list(itertools.accumulate(w.shape[0] for w in weights))[:-1]


@jax.custom_vjp
def exact_linear(x: Float[Array, "T K"], w: Float[Array, "N K"]) -> Float[Array, "T N"]:
    """Computes x W^T in float32, as exactly as a product in float32, on tensor cores. Differentiable in reverse mode.

    A float32 number is the sum of three in bfloat16, of 8 bits each. So x W^T of a bfloat16 x is three bfloat16
    products, which sum in float32: x is not written in float32. An x in float32 needs no parts.
    """
    if x.dtype == jnp.float32:
        return jnp.dot(x, w.T, precision=lax.Precision.HIGHEST)
    products = jnp.dot(x, jnp.concatenate(_parts(w, x.dtype)).T, preferred_element_type=jnp.float32)
    return jnp.sum(products.reshape(x.shape[0], _PARTS, -1), axis=1)


def _parts(x: Array, dtype: jnp.dtype) -> list[Array]:
    """Splits float32 numbers into summands in `dtype`, the largest first."""
    parts = []
    for _ in range(_PARTS):
        # XLA may leave out a conversion there and back.
        part = lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
        parts.append(part.astype(dtype))
        x -= part
    return parts


def _exact_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = saved
    if x.dtype == jnp.float32:
        return jnp.dot(dy, w, precision=lax.Precision.HIGHEST), jnp.dot(dy.T, x, precision=lax.Precision.HIGHEST)
    dys, (w_high, w_low, _) = _parts(dy, x.dtype), _parts(w, x.dtype)
    # The input's gradient is rounded to its dtype: products of the low parts lie far below that.
    dx = jnp.dot(jnp.concatenate([dys[0], dys[0], dys[1]], axis=1), jnp.concatenate([w_high, w_low, w_high]))
    dw = jnp.dot(jnp.concatenate(dys, axis=1).T, x, preferred_element_type=jnp.float32)
    return dx, jnp.sum(dw.reshape(_PARTS, *w.shape), axis=0)


exact_linear.defvjp(lambda x, w: (exact_linear(x, w), (x, w)), _exact_backward)


def compiler_options(precision: str) -> dict[str, bool] | None:
    """Returns what `jax.jit` is to tell XLA about a program in this precision."""
    return fp8.COMPILER_OPTIONS if precision == fp8.PRECISION else None
