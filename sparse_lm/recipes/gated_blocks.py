"""The nine sparse products of an FFN whose gate is a squared ReLU, on tokens in blocks: those of `slices`.

Each block computes neurons of its own, S of F. They are 2 S rows of W1, a neuron's gate and its own row by turns, and
H [T, 2 S] has its numbers G and U in that order. Of the nine products, `up`, `grad_input` and `grad_up` are two each,
computed as one:

    up           H  = X W1[rows]^T          W1 2:4 along D; then Y = relu(G)^2 U, and Y 2:4 along S
    down         O  = Y W2[ids]             Y 2:4 along S
    grad_hidden  dY = dO W2[ids]^T          W2 2:4 along D
    grad_input   dX = dH W1[rows]           dH 2:4 along S, where Y is: first of all gates, then of all own rows
    grad_up      dW1[rows] += dH^T X        dH^T 2:4 along T, stochastic (MVUE)
    grad_down    dW2[ids] += Y^T dO         Y^T 2:4 along T, stochastic (MVUE)

By turns a kept neuron's two numbers would be two of four, and two such neurons four: hence gates first in `grad_input`,
which reads the layer's W1 so, too. H is saved whole, as dense gates save it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from sparse_lm import ops
from sparse_lm.ops.formats import HiddenStats, Sparse24, SparseVenom
from sparse_lm.ops.row_order import RowOrder
from sparse_lm.recipes.base import FfnCall
from sparse_lm.recipes.block_products import Blocks


class Hidden(NamedTuple):
    """The hidden layer in slots: Y as the down product reads it, and H [Tp, 2 S]."""

    y: SparseVenom
    h: Array


def forward(x: Array, blocks: Blocks, ffn: FfnCall) -> tuple[Array, Hidden, HiddenStats]:
    """Computes O [T, D] of x [Tp, D] in slots, the hidden layer, and what selection saw of it."""
    neuron_ids, rows, v, contiguous = blocks
    neurons = ffn.w2.neurons
    options: dict[str, Any] = dict(implementation=ffn.implementation)
    with jax.named_scope("up"):
        listed = ffn.w1.among_layers(_rows_by_turns(neuron_ids, neurons))
        h = ops.sampled_matmul_24(ffn.w1.along_model, x, listed, v, contiguous=2 * contiguous, **options)
    condensed, seen = ops.gated_squared_relu_24(h, **options)
    y = ops.to_venom(condensed, neuron_ids, neurons, v, 4 * neurons // neuron_ids.shape[1], contiguous)
    with jax.named_scope("down"):
        o = ops.matmul_venom(ffn.w2.spread(y), ffn.w2.dense_of_all_layers, rows=rows, **options)
    return o, Hidden(y, h), seen


def backward(x: Array, hidden: Hidden, do: Array, rows: RowOrder, ffn: FfnCall) -> tuple[Array, Array, Array]:
    """Computes dX [T, D], dW1 [2 F, D] and dW2 [F, D] of x and dO [Tp, D] in slots."""
    (y, h), neurons = hidden, ffn.w2.neurons
    options: dict[str, Any] = dict(implementation=ffn.implementation)
    neuron_ids = y.kept_columns()
    with jax.named_scope("grad_hidden"):
        listed = ffn.w2.among_layers(neuron_ids)
        dy = ops.sampled_matmul_24(ffn.w2.along_model, do, listed, y.v, contiguous=y.contiguous, **options)
    condensed = Sparse24(y.values, y.metadata, dy.shape)
    gradients = ops.gated_squared_relu_gradients(dy, h, condensed, key=ffn.subkey(3), **options)
    with jax.named_scope("grad_input"):
        dh = ops.to_venom(gradients.dh, _gates_first(neuron_ids, neurons), 2 * neurons, y.v, y.m, y.contiguous)
        w1 = jnp.concatenate([ffn.w1.dense[::2], ffn.w1.dense[1::2]])
        dx = ops.matmul_venom(dh, w1, rows=rows, **options)
    into: dict[str, Any] = dict(out_dtype=ffn.gradient_dtype, **options)
    with jax.named_scope("grad_up"):
        listed = _rows_by_turns(neuron_ids, neurons)
        dw1 = ops.scattered_matmul_24(gradients.dh_t, x, listed, y.v, 2 * neurons, contiguous=2 * y.contiguous, **into)
    with jax.named_scope("grad_down"):
        dw2 = ops.scattered_matmul_24(gradients.y_t, do, neuron_ids, y.v, neurons, contiguous=y.contiguous, **into)
    return dx, dw1, dw2


def _rows_by_turns(neuron_ids: Array, neurons: int) -> Array:
    """Lists the rows of W1 of each block, int32 [blocks, 2 S], of its neurons; 2 F where these are F, no neuron."""
    pairs = 2 * neuron_ids[..., None] + jnp.arange(2, dtype=jnp.int32)
    return jnp.minimum(pairs, 2 * neurons).reshape(neuron_ids.shape[0], -1)


def _gates_first(neuron_ids: Array, neurons: int) -> Array:
    """Lists the same rows of a W1 that has all gates first: those of the block's neurons, then their own."""
    none = 2 * neurons
    halves = (jnp.where(neuron_ids == neurons, none, neuron_ids + first) for first in (0, neurons))
    return jnp.concatenate(list(halves), axis=1)
