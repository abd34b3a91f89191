"""Linear layers without bias, in the precision of the model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from sparse_lm.ops import fp8
from sparse_lm.ops.dense import unfused_product

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


def compiler_options(precision: str) -> dict[str, bool] | None:
    """Returns what `jax.jit` is to tell XLA about a program in this precision."""
    return fp8.COMPILER_OPTIONS if precision == fp8.PRECISION else None
