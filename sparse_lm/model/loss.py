"""Cross-entropy over a large vocabulary, a chunk of tokens at a time.

Why this exists: the logits of a step, [T, V] in float32, are its largest array by far. Here at most
`chunk` tokens have logits at one time. Since the loss is a scalar, its gradient is known up to a
factor as soon as it is computed: under differentiation the forward pass makes the gradients chunk by
chunk too, and the backward pass only scales them, so that no logits are computed twice. Products take the odds
against the targets (`ops.cross_entropy`) instead of gradients: those are the odds times a number for each token.

On a Hopper GPU a chunk's logits are never written: `ops.cross_entropy` has a kernel for the sizes in docs/kernels.md,
whose tiles have 256 classes, to which a large vocabulary is padded. XLA computes others.

Numerics: products take operands in the dtype of `hidden` and sum in float32; odds are computed in float32 and
rounded to that dtype; the gradient of the unembedding is summed over chunks in float32. What gradients owe to the
targets themselves is no part of the products, and in float32: where a model is sure, it is what is left. That
part reads the unembedding's rows rounded as the products read them, so that a row's error cancels. Odds are at
most exp(60). A token's loss of over 60 nats is therefore told as less, and its gradient is spread evenly over all
classes that far ahead of the target; `token_losses` knows no such limit.

In FP8 a chunk has logits of one product of e4m3 operands, in the dtype of `hidden`, and both gradients multiply
probabilities in e5m2. XLA computes all of it. Losses are those of these logits. Evaluation has its logits as before.

T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from sparse_lm import ops
from sparse_lm.ops import fp8
from sparse_lm.ops.cross_entropy import odds_of_logits

_TILE, _LARGE = 256, 8192  # classes; from so many on the padding takes 3% of the time at most
_ONE = 2.0**15  # a probability of 1 in e5m2, whose numbers then reach from 2^-31 to 1.75


def unembed(hidden: Array, table: Array) -> Array:
    """Computes logits f32[..., V] of hidden [..., D]: the product takes operands in hidden's dtype, sums in float32."""
    return jnp.matmul(hidden, table.astype(hidden.dtype).T, preferred_element_type=jnp.float32)


def token_losses(hidden: Array, unembedding: Array, targets: Array, chunk: int) -> Array:
    """Computes -log p(target) of each token, f32[T]; arguments as in `chunked_cross_entropy`."""
    unembedding = unembedding.astype(hidden.dtype)

    def one_chunk(inputs):
        hidden, targets = inputs
        logits = unembed(hidden, unembedding)
        return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]

    return lax.map(one_chunk, (_split(hidden, chunk), _split(targets, chunk))).reshape(-1)[: hidden.shape[0]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def chunked_cross_entropy(
    hidden: Array, unembedding: Array, targets: Array, chunk: int, precision: str = "bf16"
) -> Array:
    """Computes the mean of -log softmax(hidden unembedding^T)[target], f32[].

    `hidden` [T, D] is in the computation's dtype, `unembedding` f32[V, D], `targets` int32[T]. The logits of `chunk`
    tokens, which need not divide T, exist at one time. With `precision` "fp8" the products of training are in FP8;
    without differentiation this is the mean of `token_losses`.
    """
    return jnp.mean(token_losses(hidden, unembedding, targets, chunk))


@functools.partial(jax.named_call, name="loss")
def _forward(hidden, unembedding, targets, chunk, precision):
    (tokens, _), dtype, classes = hidden.shape, hidden.dtype, unembedding.shape[0]
    matrix = unembedding.astype(dtype)
    if classes >= _LARGE:
        matrix = jnp.pad(matrix, [(0, -classes % _TILE), (0, 0)])
    weight = 1 / tokens  # of each token in the mean; padding, of zeros, adds nothing to the products
    products = _fp8_products if precision == fp8.PRECISION else _products
    columns, factor, of_chunk = products(hidden, matrix, classes, weight)

    def step(grad_matrix, inputs):
        hidden, targets, columns = inputs
        losses, grad_hidden, rows, of_matrix = of_chunk(hidden, targets, columns)
        of_target = weight * jnp.expm1(-losses)
        grad_hidden += of_target[:, None] * rows
        return grad_matrix + of_matrix, (losses, of_target, grad_hidden.astype(dtype))

    inputs = jax.tree.map(functools.partial(_split, chunk=chunk), (hidden, targets, columns))
    grad_matrix, results = lax.scan(step, jnp.zeros(matrix.shape, jnp.float32), inputs)
    losses, of_target, grad_hidden = (array.reshape(-1, *array.shape[2:])[:tokens] for array in results)
    grad_matrix = (factor * grad_matrix).at[targets].add(of_target[:, None] * hidden)
    return jnp.mean(losses), (grad_hidden, grad_matrix[:classes].astype(unembedding.dtype))


def _products(hidden, matrix, classes, weight):
    """Prepares the products of all chunks.

    Returns:
      columns: hidden [T, D] by columns in FP8, of which each chunk is given its rows; None in bf16.
      factor: multiplies the sum over chunks of the matrix' gradients.
      of_chunk: computes of (hidden, targets, columns) losses f32[c], the hidden states' gradient less what it owes to
        targets, the targets' rows of the matrix, and the matrix' gradient, less that, too.
    """

    def of_chunk(hidden, targets, _):
        losses, odds = ops.cross_entropy(hidden, matrix, targets, classes)
        of_odds = weight * jnp.exp(-losses)
        weighted = (of_odds[:, None] * hidden).astype(hidden.dtype)
        of_matrix = jnp.matmul(odds.T, weighted, preferred_element_type=jnp.float32)
        of_hidden = of_odds[:, None] * jnp.matmul(odds, matrix, preferred_element_type=jnp.float32)
        return losses, of_hidden, matrix[targets], of_matrix

    return None, 1, of_chunk


def _fp8_products(hidden, matrix, classes, weight):
    """Does what `_products` does in FP8: logits in e4m3, probabilities in e5m2, whose range they need."""
    # Loss and gradients stay the same if all rows move together. What rows have in common would be rounded, and pull at
    # the hidden states, since rounded probabilities do not quite add up to what is pulled to the target.
    matrix -= jnp.mean(matrix[:classes], axis=0, dtype=jnp.float32).astype(matrix.dtype)
    columns, scaled = fp8.by_columns(hidden), fp8.whole(matrix)
    # Both products that read the matrix want what they sum over side by side. XLA would transpose it for each chunk.
    down = lax.optimization_barrier(scaled.values.T)
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    def of_chunk(hidden, targets, columns):
        rows = fp8.by_rows(hidden)
        logits = jnp.matmul(rows.values, scaled.values.T, preferred_element_type=hidden.dtype)
        losses, odds = odds_of_logits(logits * (rows.scale * scaled.scale), targets, classes)
        probabilities = (odds * (_ONE * jnp.exp(-losses))[:, None]).astype(jnp.float8_e5m2)
        of_hidden = product(probabilities, down.T) * (scaled.scale * (weight / _ONE))
        rows_of_targets = scaled.values[targets].astype(jnp.float32) * scaled.scale
        return losses, of_hidden, rows_of_targets, product(probabilities.T, columns)

    return columns.values, columns.scale * (weight / _ONE), of_chunk


@functools.partial(jax.named_call, name="loss")
def _backward(chunk, precision, gradients, cotangent):
    grad_hidden, grad_matrix = ((g * cotangent).astype(g.dtype) for g in gradients)  # 1 / 3 is no bfloat16
    return grad_hidden, grad_matrix, None


chunked_cross_entropy.defvjp(_forward, _backward)


def _split(x: Array, chunk: int) -> Array:
    """Splits [T, ...] into [chunks, chunk, ...], the last chunk padded with zeros."""
    chunk = min(chunk, x.shape[0])
    return jnp.pad(x, [(0, -x.shape[0] % chunk)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, chunk, *x.shape[1:])
