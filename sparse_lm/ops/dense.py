"""Dense products, as XLA has cuBLAS compute them."""

from __future__ import annotations

from jax import Array, lax
from jaxtyping import Float


def unfused_product(x: Float[Array, "*tokens K"], w: Float[Array, "K N"]) -> Float[Array, "*tokens N"]:
    """Computes X W, and keeps XLA from giving cuBLAS a sum that the result goes into.

    cuBLAS overwrites what it adds to. Where that is needed afterwards, as a layer's input is, XLA copies it first.
    Beside the mean square of the next norm the sum costs less than that copy.
    """
    return lax.optimization_barrier(x @ w)
