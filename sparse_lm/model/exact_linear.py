"""A product of bfloat16 by float32 that is as exact as one in float32, on tensor cores.

A float32 number is the sum of three in bfloat16, of 8 bits each. So x W^T of a bfloat16 x is three bfloat16 products,
which sum in float32: x is not written in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from sparse_lm.ops.shapes import Float

_PARTS = 3


@jax.custom_vjp
def exact_linear(x: Float[Array, "T K"], w: Float[Array, "N K"]) -> Float[Array, "T N"]:
    """Computes x W^T in float32. Differentiable in reverse mode.

    Args:
      x: [T, K], in bfloat16 or float32, whose product needs no parts.
      w: f32[N, K].
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


def _forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return exact_linear(x, w), (x, w)


def _backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = saved
    if x.dtype == jnp.float32:
        return jnp.dot(dy, w, precision=lax.Precision.HIGHEST), jnp.dot(dy.T, x, precision=lax.Precision.HIGHEST)
    dys, (w_high, w_low, _) = _parts(dy, x.dtype), _parts(w, x.dtype)
    # The input's gradient is rounded to its dtype: products of the low parts lie far below that.
    dx = jnp.dot(jnp.concatenate([dys[0], dys[0], dys[1]], axis=1), jnp.concatenate([w_high, w_low, w_high]))
    dw = jnp.dot(jnp.concatenate(dys, axis=1).T, x, preferred_element_type=jnp.float32)
    return dx, jnp.sum(dw.reshape(_PARTS, *w.shape), axis=0)


exact_linear.defvjp(_forward, _backward)
