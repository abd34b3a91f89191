"""Linear layers without bias, in the precision of the model."""

from __future__ import annotations

from jax import Array
from jax.ad_checkpoint import checkpoint_name

from sparse_lm.ops import fp8

SCALED = "scaled_product"  # what rematerialisation policies call a product in FP8, its scales applied


def linear(x: Array, w: Array, precision: str) -> Array:
    """Computes x W^T in the dtype of x: [..., inputs] and [outputs, inputs] -> [..., outputs]."""
    return checkpoint_name(fp8.linear(x, w), SCALED) if precision == fp8.PRECISION else x @ w.T


def compiler_options(precision: str) -> dict[str, bool] | None:
    """Returns what `jax.jit` is to tell XLA about a program in this precision."""
    return fp8.COMPILER_OPTIONS if precision == fp8.PRECISION else None
