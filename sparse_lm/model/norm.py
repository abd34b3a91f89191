"""RMSNorm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.named_call
def rms_norm(x: Array, scale: Array, epsilon: float) -> Array:
    """x / rms(x) * scale along the last axis (1910.07467), computed in float32, in the dtype of x."""
    x32 = x.astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)
    return (x32 * inverse_rms * scale).astype(x.dtype)
