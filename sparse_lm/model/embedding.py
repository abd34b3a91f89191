"""Turns tokens into vectors, and vectors into logits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from sparse_lm.collectives import ONE_DEVICE, Axes, read
from sparse_lm.config import ModelConfig
from sparse_lm.model import initializers


class Embedding(nnx.Module):
    """A table of one vector a token: `embedding` f32[V, D]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Param(initializers.matrix(rngs.params(), config.vocab_size, config.dim))

    @functools.partial(jax.named_call, name="embed")
    def __call__(self, tokens: Array, axes: Axes = ONE_DEVICE) -> Array:
        """Computes int32[...] -> [..., D] in the computation's dtype."""
        # Cast after the lookup, not before: the gradient is then scattered in float32, which a GPU adds atomically in
        # hardware. In bfloat16 each addition is a compare-and-swap loop, and tokens that occur often queue up.
        return read(self.embedding[...], axes, self.config.dtype)[tokens].astype(self.config.dtype)


def unembed(hidden: Array, table: Array) -> Array:
    """Computes logits f32[..., V] of hidden [..., D]: the product takes operands in hidden's dtype, sums in float32."""
    return jnp.matmul(hidden, table.astype(hidden.dtype).T, preferred_element_type=jnp.float32)
