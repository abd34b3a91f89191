"""The `sste` recipe: 2:4 weights by soft threshold, in the forward pass (S-STE, 2409.09099).

A soft threshold groups a weight along one dimension only, so the two backward products that contract the other one
read its values densely.

    up           H   = X W1^T      W1 2:4 along D
    down         O   = Y W2        W2 2:4 along F
    grad_hidden  dY  = dO W2^T     dense
    grad_input   dX  = dH W1       dense
    grad_up      dW1 = dH^T X      dH^T 2:4 along T, stochastic
    grad_down    dW2^T = dO^T Y    dO^T 2:4 along T, stochastic
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
from jax import Array

from sparse_lm import ops
from sparse_lm.ops.activations import ACTIVATIONS, SQUARED_RELU, activate
from sparse_lm.recipes.base import FfnCall, Stats, hidden_stats
from sparse_lm.recipes.fst import grad_down_from_do, grad_up_from_dh
from sparse_lm.recipes.soft_threshold import SoftThreshold24


@dataclasses.dataclass(frozen=True, kw_only=True)
class SSte(SoftThreshold24):
    """Trains with weights that the forward pass reads 2:4 by soft threshold."""

    name = "sste"
    products: ClassVar = {
        "up": "W1 2:4",
        "down": "W2 2:4",
        "grad_up": "dH 2:4, stochastic",
        "grad_down": "dO 2:4, stochastic",
    }
    stochastic = True
    axis_down = 0  # as the down product contracts neurons
    computes = ACTIVATIONS

    def forward(self, x: Array, ffn: FfnCall) -> tuple[Array, Stats, Any]:
        squared = self.activation == SQUARED_RELU
        with jax.named_scope("up"):
            h = ffn.w1.over_model(x, squared_relu=squared)
        y, seen, saved = activate(h, self.activation, squared=squared)
        with jax.named_scope("down"):
            o = ffn.w2.over_neurons(y)
        return o, hidden_stats(seen, *y.shape), saved

    def backward(self, x: Array, saved: Any, do: Array, ffn: FfnCall) -> tuple[Array, Array, Array]:
        with jax.named_scope("grad_hidden"):
            dy = do @ ffn.w2.dense_transposed
        options: dict[str, Any] = dict(key=ffn.subkey(1), implementation=ffn.implementation)
        dh, dh_t, y = ops.hidden_gradients(dy, saved, self.activation, **options)
        with jax.named_scope("grad_input"):
            dx = dh @ ffn.w1.dense
        return dx, grad_up_from_dh(dh_t, x, ffn), grad_down_from_do(y, do, ffn)
