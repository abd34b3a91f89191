"""Linear layers without bias, in the precision of the model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from sparse_lm.ops import fp8
from sparse_lm.ops.dense import unfused_product

SCALED = "scaled_product"  # what rematerialisation policies call a product in FP8, its scales applied


def linear(x: Array, weights: Sequence[Array], precision: str) -> list[Array]:
    """Computes x W^T of each weight in the dtype of x: [..., inputs] and [outputs, inputs] -> [..., outputs].

    FP8 makes one product of all, so that numbers are brought to e4m3 once, and with one scale for all weights.
    """
    if precision != fp8.PRECISION:
        return [unfused_product(x, w.T) for w in weights]
    ends = itertools.accumulate(w.shape[0] for w in weights)
    results = jnp.split(fp8.linear(x, jnp.concatenate(weights)), list(ends)[:-1], axis=-1)
    return [checkpoint_name(result, SCALED) for result in results]


def compiler_options(precision: str) -> dict[str, bool] | None:
    """Returns what `jax.jit` is to tell XLA about a program in this precision."""
    return fp8.COMPILER_OPTIONS if precision == fp8.PRECISION else None
