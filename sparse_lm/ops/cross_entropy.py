"""Cross entropy of a softmax over a large vocabulary, with the product that makes its logits."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from sparse_lm.ops import backends
from sparse_lm.ops.checks import check_contraction, check_matrix
from sparse_lm.ops.shapes import Float, Int32


def cross_entropy(
    x: Float[Array, "T D"],
    w: Float[Array, "V D"],
    targets: Int32[Array, " T"],
    weights: Float[Array, " T"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, " T"], Float[Array, "T V"]]:
    """Computes losses -log softmax(x w^T)[target], and the gradients of their weighted sum with respect to x w^T.

    It is not differentiable: its gradients are what a loss needs to write its own derivative.

    Args:
      x: [T, D].
      w: [V, D] in the dtype of x.
      targets: int32 [T], in 0..V - 1.
      weights: float32 [T], of each loss in the sum.
      implementation: backend that must run this; the best one by default.

    Returns:
      losses: float32 [T]. The loss of a row of x w^T that has a NaN or an inf is not finite.
      gradients: [T, V] in the dtype of x.

    Raises:
      ValueError: shapes or dtypes do not match.
      NotImplementedError: the named backend cannot run this.
    """
    check_matrix("x", x)
    check_matrix("w", w)
    check_contraction("x", x.shape, "w^T", w.shape[::-1])
    if x.dtype != w.dtype:
        raise ValueError(f"x and w must have one dtype, not {x.dtype} and {w.dtype}")
    for name, array, dtype in (("targets", targets, jnp.int32), ("weights", weights, jnp.float32)):
        if array.shape != x.shape[:1] or array.dtype != dtype:
            raise ValueError(
                f"{name} must be {jnp.dtype(dtype)}[{x.shape[0]}], one for each row of x; "
                f"got {array.dtype}{list(array.shape)}"
            )
    return backends.dispatch("cross_entropy", implementation, x, w, targets, weights)
