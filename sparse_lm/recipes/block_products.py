"""The six sparse products of tokens in blocks, each block at neurons of its own: those of `slices` and `experts24`.

A block is of v slots, and its neurons, S of F, are contiguous, all or some at a time. What is computed is 2:4 inside:

    up           Y   = relu(X W1[ids]^T)^2    W1 2:4 along D; Y 2:4 along S in the same kernel
    down         O   = Y W2[ids]              Y 2:4 along S
    grad_hidden  dY  = dO W2[ids]^T           W2 2:4 along D
    grad_input   dX  = dH W1[ids]             dH 2:4 along S, where Y is
    grad_up      dW1[ids] += dH^T X           dH^T 2:4 along T, stochastic (MVUE)
    grad_down    dW2[ids] += Y^T dO           Y^T 2:4 along T, stochastic (MVUE)

O and dX are put into the order of the rows as the products store them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import Array

from sparse_lm import ops
from sparse_lm.ops.formats import HiddenStats, Sparse24, SparseVenom
from sparse_lm.ops.row_order import RowOrder
from sparse_lm.recipes.base import FfnCall


class Blocks(NamedTuple):
    """Which neurons each block of slots computes.

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


def forward(x: Array, blocks: Blocks, ffn: FfnCall) -> tuple[Array, SparseVenom, HiddenStats]:
    """Computes O [T, D] of x [Tp, D] in slots, the hidden layer, and what selection saw of it."""
    neuron_ids, rows, v, contiguous = blocks
    options: dict[str, Any] = dict(implementation=ffn.implementation)
    with jax.named_scope("up"):
        condensed, seen = ops.sampled_squared_relu_24(
            ffn.w1.along_model, x, ffn.w1.among_layers(neuron_ids), v, contiguous=contiguous, **options
        )
    m = 4 * ffn.w1.neurons // neuron_ids.shape[1]
    y = ops.to_venom(condensed, neuron_ids, ffn.w1.neurons, v, m, contiguous)
    with jax.named_scope("down"):
        o = ops.matmul_venom(ffn.w2.spread(y), ffn.w2.dense_of_all_layers, rows=rows, **options)
    return o, y, seen


def backward(
    x: Array, y: SparseVenom, do: Array, rows: RowOrder, ffn: FfnCall
) -> tuple[Array, Array, Array, SparseVenom]:
    """Computes dX [T, D], dW1 and dW2 [F, D], and dH, whose entries stand where those of y do, of x and dO [Tp, D] in
    slots."""
    options: dict[str, Any] = dict(implementation=ffn.implementation)
    slices: dict[str, Any] = dict(contiguous=y.contiguous, **options)
    neuron_ids = y.kept_columns()
    with jax.named_scope("grad_hidden"):
        dy = ops.sampled_matmul_24(ffn.w2.along_model, do, ffn.w2.among_layers(neuron_ids), y.v, **slices)
    condensed = Sparse24(y.values, y.metadata, dy.shape)
    gradients = ops.squared_relu_gradients(dy, condensed, key=ffn.subkey(3), **options)
    dh = dataclasses.replace(y, values=gradients.dh.values)
    with jax.named_scope("grad_input"):
        dx = ops.matmul_venom(ffn.w1.spread(dh), ffn.w1.dense_of_all_layers, rows=rows, **options)
    into: dict[str, Any] = dict(out_dtype=ffn.gradient_dtype, **slices)
    with jax.named_scope("grad_up"):
        dw1 = ops.scattered_matmul_24(gradients.dh_t, x, neuron_ids, y.v, ffn.w1.neurons, **into)
    with jax.named_scope("grad_down"):
        dw2 = ops.scattered_matmul_24(gradients.y_t, do, neuron_ids, y.v, ffn.w2.neurons, **into)
    return dx, dw1, dw2, dh
