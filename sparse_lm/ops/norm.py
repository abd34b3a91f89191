"""RMSNorm, and a residual's sum with its norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from sparse_lm.ops import backends
from sparse_lm.ops.checks import check_array, check_float, described

SAVED = "norm"  # what rematerialisation policies call what gradients of norms, and of what reads them, need


@jax.named_call
def rms_norm(x: Array, scale: Array, epsilon: float) -> Array:
    """Computes x / rms(x) * scale along the last axis (1910.07467) in float32; returns it in the dtype of x."""
    x32 = x.astype(jnp.float32)
    mean_square = checkpoint_name(jnp.mean(jnp.square(x32), axis=-1, keepdims=True), SAVED)
    return (x32 * lax.rsqrt(mean_square + epsilon) * scale).astype(x.dtype)


@jax.named_call
def add_norm(
    x: Float[Array, "*batch D"],
    update: Float[Array, "*batch D"] | None,
    scale: Float[Array, " D"],
    epsilon: float,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch D"]]:
    """Computes x + update, in one dtype, and the sum's `rms_norm`; returns both. Differentiable in reverse mode.

    Without an update the sum is x itself: reading it here and not where x came from, the gradients that come by it and
    by the norm are summed in the pass that computes the norm's.
    """
    for name, array in (("x", x), ("update", x if update is None else update), ("scale", scale)):
        check_array(name, array)
        check_float(f"dtype of {name}", array.dtype)
    if not x.ndim or not x.size:
        raise ValueError(f"x must be [..., D], not a scalar and not empty; got {described(x)}")
    if update is not None and (update.shape, update.dtype) != (x.shape, x.dtype):
        raise ValueError(f"x and update must be alike, not {described(x)} and {described(update)}")
    if scale.shape != x.shape[-1:]:
        raise ValueError(f"scale must be [{x.shape[-1]}], a number for each column of x, not {list(scale.shape)}")
    return backends.dispatch("add_norm", implementation, x, update, scale, epsilon)
