"""Cross entropy of a softmax over a large vocabulary, with the product that makes its logits."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from sparse_lm.ops import backends
from sparse_lm.ops.checks import check_array, check_contraction, check_matrix, described

LARGEST_LOG_ODDS = 60.0
"""No token's odds are larger than its exponential, so that neither they nor their sums overflow."""


def odds_of_logits(
    logits: Float[Array, "T V"], targets: Int32[Array, " T"], classes: int
) -> tuple[Float[Array, " T"], Float[Array, "T V"]]:
    """Computes losses and odds as `cross_entropy` does, in float32, of logits in any dtype."""
    logits = logits.astype(jnp.float32)
    of_targets = jnp.take_along_axis(logits, targets[:, None], axis=1)
    odds = jnp.exp(jnp.minimum(logits - of_targets, LARGEST_LOG_ODDS))
    columns = jnp.arange(logits.shape[1])
    odds = jnp.where((columns == targets[:, None]) | (columns >= classes), 0, odds)
    return jnp.where(jnp.isfinite(of_targets[:, 0]), jnp.log1p(jnp.sum(odds, axis=1)), jnp.nan), odds


def cross_entropy(
    x: Float[Array, "T D"],
    w: Float[Array, "V D"],
    targets: Int32[Array, " T"],
    classes: int | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, " T"], Float[Array, "T V"]]:
    """Computes losses -log softmax(x w^T)[target], and each token's odds against the target.

    The odds are exp(logit - logit of the target), 0 at the target itself. So the loss is log(1 + their sum), with no
    cancellation where a model is sure, and gradients follow with no further pass over [T, V]:

        d loss / d logit    exp(-loss) odds, and at the target expm1(-loss)

    It is not differentiable: the odds are what a loss needs to write its own derivative. They count as exp(60) where
    they are larger, where a loss would be more than 60 nats.

    Args:
      x, w: bfloat16 or float32, both of one dtype.
      targets: in 0..classes - 1; the loss of another is NaN.
      classes: how many rows of w are classes, all by default; rows after them are padding, whose odds are 0.

    Returns:
      Losses in float32, and odds in the dtype of x. The loss of a row of x that has a NaN or an inf is not finite.
    """
    check_matrix("x", x)
    check_matrix("w", w)
    check_contraction("x", x.shape, "w^T", w.shape[::-1])
    if x.dtype != w.dtype:
        raise ValueError(f"x and w must have one dtype, not {x.dtype} and {w.dtype}")
    if jnp.finfo(x.dtype).max < jnp.finfo(jnp.bfloat16).max:
        raise ValueError(f"x must be bfloat16 or float32, whose range odds need, not {x.dtype}")
    check_array("targets", targets)
    if targets.shape != x.shape[:1] or targets.dtype != jnp.int32:
        raise ValueError(f"targets must be int32[{x.shape[0]}], one for each row of x; got {described(targets)}")
    classes = w.shape[0] if classes is None else classes
    if not 0 < classes <= w.shape[0]:
        raise ValueError(f"classes must be in 1..{w.shape[0]}, the rows of w, not {classes}")
    losses, odds = backends.dispatch("cross_entropy", implementation, x, w, targets, classes)
    return jnp.where((targets >= 0) & (targets < classes), losses, jnp.nan), odds
