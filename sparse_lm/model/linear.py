"""Linear layers without bias, in the precision of the model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
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
        apart = _apart(x)  # by all products but the first
        return [unfused_product(apart if number else x, w.T) for number, w in enumerate(weights)]
    ends = itertools.accumulate(w.shape[0] for w in weights)
    results = jnp.split(fp8.linear(x, jnp.concatenate(weights)), list(ends)[:-1], axis=-1)
    return [checkpoint_name(result, SCALED) for result in results]


@jax.custom_vjp
def _apart(x: Array) -> Array:
    """Returns x; the gradients of those who read the result are summed before they are added to those of x.

    JAX sums in turn, (a + b) + c. XLA lets cuBLAS add a product to another, but not to such a sum: c would take a pass
    over memory of its own. Of c + (a + b) cuBLAS computes both sums.
    """
    return x


_apart.defvjp(lambda x: (x, None), lambda _, gradient: (gradient,))


def compiler_options(precision: str) -> dict[str, bool] | None:
    """Returns what `jax.jit` is to tell XLA about a program in this precision."""
    return fp8.COMPILER_OPTIONS if precision == fp8.PRECISION else None
