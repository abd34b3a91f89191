"""The `dense` recipe: all six products as they are. The baseline, and the phase before and after a sparse one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from sparse_lm.ops.formats import HiddenStats
from sparse_lm.recipes.base import FfnCall, Recipe, Stats, hidden_stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Recipe):
    """Computes all six products densely."""

    name = "dense"

    def forward(self, x: Array, ffn: FfnCall) -> tuple[Array, Stats, Any]:
        with jax.named_scope("up"):
            h = x @ ffn.w1.dense.T
        y, stats = dense_squared_relu(h)
        with jax.named_scope("down"):
            o = y @ ffn.w2.dense
        return o, stats, y

    def backward(self, x: Array, saved: Any, do: Array, ffn: FfnCall) -> tuple[Array, Array, Array]:
        y = saved
        with jax.named_scope("grad_hidden"):
            dy = do @ ffn.w2.dense.T
        dh = dy * 2 * jnp.sqrt(y)
        with jax.named_scope("grad_input"):
            dx = dh @ ffn.w1.dense
        with jax.named_scope("grad_up"):
            dw1 = jnp.matmul(dh.T, x, preferred_element_type=ffn.gradient_dtype)
        with jax.named_scope("grad_down"):
            dw2 = jnp.matmul(y.T, do, preferred_element_type=ffn.gradient_dtype)
        return dx, dw1, dw2


@jax.named_call
def dense_squared_relu(h: Array) -> tuple[Array, Stats]:
    """Computes Y = relu(H)^2 [T, F] and its statistics; nothing is selected."""
    y = jnp.square(jax.nn.relu(h))
    energy = jnp.sum(jnp.square(y.astype(jnp.float32)))
    return y, hidden_stats(HiddenStats(jnp.sum(y != 0, dtype=jnp.float32), energy, energy), *h.shape)


DENSE = Dense()
