"""Tokens to vectors, and vectors to logits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from sparse_lm.config import ModelConfig
from sparse_lm.model import initializers

ONE_HOT_VOCABULARY = 4096
"""Largest vocabulary whose embedding gradient is a product with one-hot rows on a GPU."""


class Embedding(nnx.Module):
    """A table of one vector a token: `embedding` f32[V, D]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Param(initializers.matrix(rngs.params(), config.vocab_size, config.dim))

    def __call__(self, tokens: Array) -> Array:
        """int32[...] -> [..., D] in the computation's dtype."""
        return embed(self.embedding[...], tokens, self.config.dtype)


def embed(table: Array, tokens: Array, dtype: str) -> Array:
    """Rows of `table` f32[V, D] for int32[...] tokens: [..., D] in `dtype`. The gradient is float32."""
    return _embed(table, tokens, dtype, table.shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _embed(table: Array, tokens: Array, dtype: str, vocabulary: int) -> Array:
    return table[tokens].astype(dtype)


def _embed_forward(table, tokens, dtype, vocabulary):
    return _embed(table, tokens, dtype, vocabulary), tokens


def _embed_backward(dtype, vocabulary, tokens, gradient):
    tokens, gradient = tokens.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
    # A GPU adds the rows of a scatter atomically. With few distinct tokens they queue up at the same
    # addresses; with few vocabulary entries a dense product is cheap. On a CPU the scatter always wins.
    if vocabulary <= ONE_HOT_VOCABULARY and jax.default_backend() == "gpu":
        one_hot = jax.nn.one_hot(tokens, vocabulary, dtype=dtype)
        return jnp.matmul(one_hot.T, gradient, preferred_element_type=jnp.float32), None
    table = jnp.zeros((vocabulary, gradient.shape[-1]), jnp.float32)
    return table.at[tokens].add(gradient.astype(jnp.float32)), None


_embed.defvjp(_embed_forward, _embed_backward)


def unembed(hidden: Array, table: Array) -> Array:
    """Logits f32[..., V] of hidden [..., D]: the product takes operands in hidden's dtype, sums in float32."""
    return jnp.matmul(hidden, table.astype(hidden.dtype).T, preferred_element_type=jnp.float32)
