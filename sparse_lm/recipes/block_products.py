"""Sparse products that several recipes share: of tokens in blocks, and weight gradients of a dense hidden layer.

A block is of v slots, and its neurons, S of F, are contiguous, all or some at a time. `slices` and `experts24` compute
these products of blocks, 2:4 inside:

    up           Y   = relu(X W1[ids]^T)^2    W1 2:4 along D; Y 2:4 along S in the same kernel
    down         O   = Y W2[ids]              Y 2:4 along S
    grad_hidden  dY  = dO W2[ids]^T           W2 2:4 along D
    grad_input   dX  = dH W1[ids]             dH 2:4 along S, where Y is
    grad_up      dW1[ids] += dH^T X           dH^T 2:4 along T, stochastic (MVUE, 2203.10991)
    grad_down    dW2[ids] += Y^T dO           Y^T 2:4 along T, stochastic (MVUE)

With the gate relu(G)^2, W1 [2 F, D] has a neuron's gate and its own row by turns, and so has H [T, 2 S] its numbers G
and U: Y = relu(G)^2 U. `up`, `grad_input` and `grad_up` are two products each, computed as one. By turns a kept
neuron's two numbers would be two of four, and two such neurons four: hence `grad_input` reads dH, and the layer's W1,
with all gates first. H is saved whole, as dense gates save it.

O and dX are put into the order of the rows as the products store them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from sparse_lm import ops
from sparse_lm.ops.formats import HiddenStats, Sparse24, SparseVenom
from sparse_lm.ops.row_order import RowOrder
from sparse_lm.recipes.base import FfnCall


class Blocks(NamedTuple):
    """Says which neurons each block of slots computes.

    Attributes:
      neuron_ids: int32[Tp / v, S]. A block without tokens lists F throughout, no neuron, and products skip it.
      rows: the order of T rows in Tp slots.
      v: slots of a block.
      contiguous: how many neurons at a time are consecutive.
    """

    neuron_ids: Array
    rows: RowOrder
    v: int
    contiguous: int


class Hidden(NamedTuple):
    """The hidden layer in slots: Y as the down product reads it, and with a gate H [Tp, 2 S]."""

    y: SparseVenom
    h: Array | None


def forward(x: Array, blocks: Blocks, ffn: FfnCall) -> tuple[Array, Hidden, HiddenStats]:
    """Computes O [T, D] of x [Tp, D] in slots, the hidden layer, and what selection saw of it."""
    neuron_ids, rows, v, contiguous = blocks
    neurons, h = ffn.w2.neurons, None
    options: dict[str, Any] = dict(implementation=ffn.implementation)
    listed = ffn.w1.among_layers(_rows_of_w1(neuron_ids, ffn))
    if _is_gated(ffn):
        with jax.named_scope("up"):
            h = ops.sampled_matmul_24(ffn.w1.along_model, x, listed, v, contiguous=2 * contiguous, **options)
        condensed, seen = ops.gated_squared_relu_24(h, **options)
    else:
        with jax.named_scope("up"):
            up = ffn.w1.along_model, x, listed, v
            condensed, seen = ops.sampled_squared_relu_24(*up, contiguous=contiguous, **options)
    y = ops.to_venom(condensed, neuron_ids, neurons, v, 4 * neurons // neuron_ids.shape[1], contiguous)
    with jax.named_scope("down"):
        o = ops.matmul_venom(ffn.w2.spread(y), ffn.w2.dense_of_all_layers, rows=rows, **options)
    return o, Hidden(y, h), seen


def backward(
    x: Array, hidden: Hidden, do: Array, rows: RowOrder, ffn: FfnCall
) -> tuple[Array, Array, Array, SparseVenom]:
    """Computes dX [T, D], dW1 and dW2 [F, D], and dH, of x and dO [Tp, D] in slots.

    Without a gate, entries of dH stand where those of Y do.
    """
    (y, h), neurons = hidden, ffn.w2.neurons
    options: dict[str, Any] = dict(implementation=ffn.implementation)
    neuron_ids = y.kept_columns()
    with jax.named_scope("grad_hidden"):
        listed = ffn.w2.among_layers(neuron_ids)
        dy = ops.sampled_matmul_24(ffn.w2.along_model, do, listed, y.v, contiguous=y.contiguous, **options)
    condensed = Sparse24(y.values, y.metadata, dy.shape)
    if h is None:
        gradients = ops.squared_relu_gradients(dy, condensed, key=ffn.subkey(3), **options)
        dh = dataclasses.replace(y, values=gradients.dh.values)
        spread, w1 = ffn.w1.spread(dh), ffn.w1.dense_of_all_layers
    else:
        gradients = ops.gated_squared_relu_gradients(dy, h, condensed, key=ffn.subkey(3), **options)
        gates_first = _gates_first(neuron_ids, neurons)
        dh = spread = ops.to_venom(gradients.dh, gates_first, 2 * neurons, y.v, y.m, y.contiguous)
        w1 = jnp.concatenate([ffn.w1.dense[::2], ffn.w1.dense[1::2]])
    with jax.named_scope("grad_input"):
        dx = ops.matmul_venom(spread, w1, rows=rows, **options)
    into: dict[str, Any] = dict(out_dtype=ffn.gradient_dtype, **options)
    with jax.named_scope("grad_up"):
        contiguous = ffn.w1.neurons // neurons * y.contiguous
        listed = _rows_of_w1(neuron_ids, ffn)
        dw1 = ops.scattered_matmul_24(gradients.dh_t, x, listed, y.v, ffn.w1.neurons, contiguous=contiguous, **into)
    with jax.named_scope("grad_down"):
        dw2 = ops.scattered_matmul_24(gradients.y_t, do, neuron_ids, y.v, neurons, contiguous=y.contiguous, **into)
    return dx, dw1, dw2, dh


def _is_gated(ffn: FfnCall) -> bool:
    return ffn.w1.neurons > ffn.w2.neurons


def _rows_of_w1(neuron_ids: Array, ffn: FfnCall) -> Array:
    """Lists the rows of W1 of each block's neurons: with a gate two by turns, [blocks, 2 S]; 2 F for no neuron."""
    if not _is_gated(ffn):
        return neuron_ids
    pairs = 2 * neuron_ids[..., None] + jnp.arange(2, dtype=jnp.int32)
    return jnp.minimum(pairs, ffn.w1.neurons).reshape(neuron_ids.shape[0], -1)


def _gates_first(neuron_ids: Array, neurons: int) -> Array:
    """Lists the same rows of a W1 that has all gates first: those of the block's neurons, then their own."""
    none = 2 * neurons
    halves = (jnp.where(neuron_ids == neurons, none, neuron_ids + first) for first in (0, neurons))
    return jnp.concatenate(list(halves), axis=1)


@jax.named_call
def grad_up_from_dh(dh: Array, x: Array, ffn: FfnCall) -> Array:
    """Computes dW1 = dH^T X [F, D] with dH^T 2:4 along tokens, stochastic (MVUE), of a dense dH."""
    dh_t = ops.sparsify_24(dh, "mvue", 0, key=ffn.subkey(1), implementation=ffn.implementation)
    return ops.matmul_24(dh_t, x, out_dtype=ffn.gradient_dtype, implementation=ffn.implementation)


@jax.named_call
def grad_down_from_do(y: Array, do: Array, ffn: FfnCall) -> Array:
    """Computes dW2 = Y^T dO [F, D] as (dO^T Y)^T, since the sparse operand, dO^T 2:4 along tokens, comes first."""
    do_t = ops.sparsify_24(do, "mvue", 0, key=ffn.subkey(2), implementation=ffn.implementation)
    options: dict[str, Any] = dict(out_dtype=ffn.gradient_dtype, implementation=ffn.implementation)
    return ops.matmul_24(do_t, y, out_transposed=True, **options)
