"""The next token from its logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


def sample(logits: Array, key: Array, temperature: Array, top_p: Array) -> Array:
    """Draws one token, int32[], from logits f32[V].

    Args:
      logits: f32[V].
      key: random key.
      temperature: f32[], divides the logits; 0 takes the most probable token.
      top_p: f32[] in (0, 1]; see `keep_top_p`.
    """

    def draw() -> Array:
        return jax.random.categorical(key, keep_top_p(logits / temperature, top_p)).astype(jnp.int32)

    # A branch, not a choice between two results: drawing sorts the vocabulary.
    return lax.cond(temperature > 0, draw, lambda: jnp.argmax(logits).astype(jnp.int32))


def keep_top_p(logits: Array, top_p: Array) -> Array:
    """Nucleus filter (1904.09751): logits f32[V] with -inf outside the nucleus.

    The nucleus is the smallest set of most probable tokens whose probabilities reach `top_p`. Of
    equally probable tokens the lower ones enter first.
    """
    order = jnp.argsort(logits, descending=True, stable=True)
    probabilities = jax.nn.softmax(logits[order])
    mass_before = jnp.cumsum(probabilities) - probabilities
    # The most probable token stays whatever rounding does; with top_p = 1 so do all.
    kept = (mass_before < top_p).at[0].set(True) | (top_p >= 1)
    return jnp.where(jnp.zeros_like(kept).at[order].set(kept), logits, -jnp.inf)
