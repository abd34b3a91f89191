"""Cross-entropy over a large vocabulary, a chunk of tokens at a time.

Why this exists: the logits of a step, [T, V] in float32, are its largest array by far. Here at most
`chunk` tokens have logits at one time. Since the loss is a scalar, its gradient is known up to a
factor as soon as it is computed: under differentiation the forward pass makes the gradients chunk by
chunk too, and the backward pass only scales them, so that no logits are computed twice.

On a Hopper GPU a chunk's logits are never written: `ops.cross_entropy` has a kernel for hidden states in
bfloat16, chunks of a multiple of 128 tokens, and D and V in multiples of 256. Others train by XLA.

Numerics: products take operands in the dtype of `hidden` and sum in float32; softmax is in float32;
the gradient of the unembedding is summed over chunks in float32.

T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from sparse_lm import ops
from sparse_lm.model.embedding import unembed


def token_losses(hidden: Array, unembedding: Array, targets: Array, chunk: int) -> Array:
    """Computes -log p(target) of each token, f32[T]; arguments as in `chunked_cross_entropy`."""
    unembedding = unembedding.astype(hidden.dtype)

    def one_chunk(inputs):
        hidden, targets = inputs
        logits = unembed(hidden, unembedding)
        return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]

    losses = lax.map(one_chunk, (_split(hidden, chunk), _split(targets, chunk)))
    return losses.reshape(-1)[: hidden.shape[0]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def chunked_cross_entropy(hidden: Array, unembedding: Array, targets: Array, chunk: int) -> Array:
    """Computes the mean of -log softmax(hidden unembedding^T)[target].

    Args:
      hidden: [T, D] in the computation's dtype.
      unembedding: f32[V, D].
      targets: int32[T].
      chunk: tokens whose logits exist at one time; need not divide T.

    Returns:
      f32[].
    """
    return jnp.mean(token_losses(hidden, unembedding, targets, chunk))


@functools.partial(jax.named_call, name="loss")
def _forward(hidden, unembedding, targets, chunk):
    tokens, dtype = hidden.shape[0], hidden.dtype
    matrix = unembedding.astype(dtype)
    weights = jnp.full(tokens, 1 / tokens, jnp.float32)  # of each token in the mean; padding gets zero

    def step(grad_matrix, inputs):
        hidden, targets, weights = inputs
        losses, grad_logits = ops.cross_entropy(hidden, matrix, targets, weights)
        grad_matrix += jnp.matmul(grad_logits.T, hidden, preferred_element_type=jnp.float32)
        return grad_matrix, (losses, grad_logits @ matrix)

    inputs = _split(hidden, chunk), _split(targets, chunk), _split(weights, chunk)
    grad_matrix, (losses, grad_hidden) = lax.scan(step, jnp.zeros(matrix.shape, jnp.float32), inputs)
    loss = jnp.mean(losses.reshape(-1)[:tokens])
    return loss, (grad_hidden.reshape(-1, hidden.shape[1])[:tokens], grad_matrix.astype(unembedding.dtype))


@functools.partial(jax.named_call, name="loss")
def _backward(chunk, gradients, cotangent):
    grad_hidden, grad_matrix = (g * cotangent.astype(g.dtype) for g in gradients)
    return grad_hidden, grad_matrix, None


chunked_cross_entropy.defvjp(_forward, _backward)


def _split(x: Array, chunk: int) -> Array:
    """Splits [T, ...] into [chunks, chunk, ...], the last chunk padded with zeros."""
    chunk = min(chunk, x.shape[0])
    padding = -x.shape[0] % chunk
    return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, chunk, *x.shape[1:])
