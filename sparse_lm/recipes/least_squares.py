"""Turns an FFN that a recipe computes into a dense one, by least squares.

Where a recipe leaves out activations, dense products with its weights compute something else: activations that were
never trained together add up. A W2 that is fitted to what the recipe computes takes that back.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import cho_factor, cho_solve
from jaxtyping import Float

from sparse_lm.recipes.activations import activate
from sparse_lm.recipes.base import Recipe

RIDGE = 0.01  # times a neuron's mean sum of squares: how hard it is for W2 to leave what it was
_EXACT = lax.Precision.HIGHEST


def fit_dense(
    recipe: Recipe, w1: Float[Array, "rows D"], w2: Float[Array, "F D"], state: Any, x: Float[Array, "*batches T D"]
) -> tuple[Float[Array, "rows D"], Float[Array, "F D"]]:
    """Returns W1 and W2 with which a dense FFN comes closest to what a recipe computes on some inputs.

    W1 is what the sparse forward reads. W2 minimises |Y W - O|^2 + r |W - W2'|^2 in float32, where Y is the dense FFN's
    hidden layer, O what the recipe computes, W2' what the sparse forward reads and r `RIDGE` times the mean of Y's
    columns' |y|^2. That takes some arrays of [F, F].

    Args:
      recipe: in its sparse phase, as the weights and `state` are.
      x: the FFN's inputs, 16 tokens for each neuron or more, in batches that are computed one at a time.

    Raises:
      ValueError, NotImplementedError: where `recipe.ffn` does.
    """
    up, down = recipe.leave(w1, w2, state)

    def add(sums: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], None]:
        o, _ = recipe.for_evaluation().ffn(x, w1, w2, state)
        y, *_ = activate(jnp.dot(x.astype(jnp.float32), up.T, precision=_EXACT), recipe.activation)
        missing = o.astype(jnp.float32) - jnp.dot(y, down, precision=_EXACT)
        gram, cross = sums
        return (gram + jnp.dot(y.T, y, precision=_EXACT), cross + jnp.dot(y.T, missing, precision=_EXACT)), None

    nothing = jnp.zeros((down.shape[0],) * 2), jnp.zeros(down.shape)
    (gram, cross), _ = lax.scan(add, nothing, x.reshape(-1, *x.shape[-2:]))
    ridge = jnp.maximum(RIDGE * jnp.trace(gram) / gram.shape[0], jnp.finfo(jnp.float32).tiny)
    return up, down + cho_solve(cho_factor(gram + ridge * jnp.eye(gram.shape[0])), cross)
