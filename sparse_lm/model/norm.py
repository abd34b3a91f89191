"""RMSNorm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

MEAN_SQUARE = "mean_square"  # what rematerialisation policies call that of a vector


@jax.named_call
def rms_norm(x: Array, scale: Array, epsilon: float) -> Array:
    """x / rms(x) * scale along the last axis (1910.07467), computed in float32, in the dtype of x."""
    x32 = x.astype(jnp.float32)
    mean_square = checkpoint_name(jnp.mean(jnp.square(x32), axis=-1, keepdims=True), MEAN_SQUARE)
    return (x32 * lax.rsqrt(mean_square + epsilon) * scale).astype(x.dtype)
