"""The `dense` recipe: all six products as they are. The baseline, and the phase before and after a sparse one.

In FP8 all six are in e4m3, and the hidden layer and its gradient are brought to it once for all products that read
them. It computes a mixture's experts, too, by grouped products: each block of slots with its expert's rows of the
weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from sparse_lm import ops
from sparse_lm.ops import fp8
from sparse_lm.ops.activations import ACTIVATIONS, SQUARED_RELU, activate, gradient, hidden
from sparse_lm.ops.dense import unfused_product
from sparse_lm.ops.row_order import combine
from sparse_lm.recipes.base import FfnCall, Recipe, Stats, hidden_stats
from sparse_lm.recipes.groups import fitting_block

_MOST_SLOTS = 128  # of a block of a mixture's pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Recipe):
    """Computes all six products densely."""

    name = "dense"
    computes = computes_experts = ACTIVATIONS

    def forward(self, x: Array, ffn: FfnCall) -> tuple[Array, Stats, Any]:
        if self._one_pass:
            with jax.named_scope("up"):
                product = fp8.product(fp8.by_rows(x), ffn.w1.dense.T)
            with jax.named_scope("down"):
                (scaled, y_t), seen = fp8.squared_relu(product)
                o = fp8.times(scaled, ffn.w2.dense)
            return o, hidden_stats(seen, *scaled.values.shape), (product, y_t)
        with jax.named_scope("up"):
            h = _times(self._rows(x), ffn.w1.dense.T)
        y, seen, saved = activate(h, self.activation)
        with jax.named_scope("down"):
            rows = self._rows(y)
            o = _times(rows, ffn.w2.dense, unfused_product)
        return o, hidden_stats(seen, *y.shape), (saved, rows.T if self.in_fp8 else None)

    def backward(self, x: Array, saved: Any, do: Array, ffn: FfnCall) -> tuple[Array, Array, Array]:
        saved, y_t = saved
        if not self._one_pass:
            with jax.named_scope("grad_hidden"):
                dy = _times(self._rows(do), ffn.w2.dense.T)
            rows = self._rows(gradient(dy, saved, self.activation))
            dh_t = rows.T
        else:
            with jax.named_scope("grad_hidden"):
                product = fp8.product(fp8.by_rows(do), ffn.w2.dense.T)
            rows, dh_t = fp8.squared_relu_gradients(product, saved)
        with jax.named_scope("grad_input"):
            dx = _times(rows, ffn.w1.dense)
        with jax.named_scope("grad_up"):
            dw1 = _sum_over_rows(dh_t, x, ffn)
        with jax.named_scope("grad_down"):
            dw2 = _sum_over_rows(y_t if self.in_fp8 else hidden(saved, self.activation).T, do, ffn)
        return dx, dw1, dw2

    @property
    def _one_pass(self) -> bool:
        """Returns True if the hidden layer and its gradient go to e4m3 without being written in between."""
        return self.in_fp8 and self.activation == SQUARED_RELU

    def _rows(self, x: Array) -> Array | fp8.Scaled:
        """Brings activations or their gradients to the form that products read."""
        return fp8.by_rows(x) if self.in_fp8 else x

    def block_of_experts(self, pairs: int, experts: int) -> int:
        return fitting_block(_MOST_SLOTS, pairs, experts)

    def forward_experts(self, x: Array, ffn: FfnCall) -> tuple[Array, Stats, Any]:
        blocks, options = _blocks(ffn)
        with jax.named_scope("up"):
            h = ops.grouped_up(x, ffn.w1.dense, *blocks, **options)
        y, seen, saved = activate(h, self.activation)
        with jax.named_scope("down"):
            o = ops.grouped_down(y, ffn.w2.dense, *blocks, **options)
        stats = hidden_stats(ffn.groups.total(seen), ffn.groups.pairs, y.shape[1])
        return combine(o, ffn.groups.rows), stats, saved

    def backward_experts(self, x: Array, saved: Any, do: Array, ffn: FfnCall) -> tuple[Array, Array, Array, Array]:
        y, (blocks, options) = hidden(saved, self.activation), _blocks(ffn)
        into: dict[str, Any] = dict(out_dtype=ffn.gradient_dtype, implementation=ffn.implementation)
        with jax.named_scope("grad_hidden"):
            dy = ops.grouped_up(do, ffn.w2.dense, *blocks, **options)
        dh, y_dy = gradient(dy, saved, self.activation), jnp.sum(y.astype(jnp.float32) * dy, axis=1)
        with jax.named_scope("grad_input"):
            dx = ops.grouped_down(dh, ffn.w1.dense, *blocks, **options)
        with jax.named_scope("grad_up"):
            dw1 = ops.grouped_weights(dh, x, *blocks, **into)
        with jax.named_scope("grad_down"):
            dw2 = ops.grouped_weights(y, do, *blocks, **into)
        return combine(dx, ffn.groups.rows), dw1, dw2, y_dy


def _times(rows: Array | fp8.Scaled, weights: Array, product: Callable[[Array, Array], Array] = jnp.matmul) -> Array:
    return fp8.times(rows, weights) if isinstance(rows, fp8.Scaled) else product(rows, weights)


def _sum_over_rows(transposed: Array | fp8.Scaled, b: Array, ffn: FfnCall) -> Array:
    if isinstance(transposed, fp8.Scaled):
        return fp8.sum_over_rows(transposed, b, ffn.gradient_dtype)
    return jnp.matmul(transposed, b, preferred_element_type=ffn.gradient_dtype)


def _blocks(ffn: FfnCall) -> tuple[tuple[Array, int, int], dict[str, Any]]:
    """Returns what grouped products read of a mixture's groups, and their options."""
    groups, padded = ffn.groups, ffn.groups.axis is not None  # of split experts most blocks are padding
    block_experts = groups.block_experts
    if padded:
        block_experts = jnp.where(groups.blocks_with_pairs(), block_experts, groups.experts)
    return (block_experts, groups.v, groups.experts), dict(padded=padded, implementation=ffn.implementation)


DENSE = Dense()
