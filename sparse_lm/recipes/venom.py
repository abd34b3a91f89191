"""The `venom` recipe: all six products sparse, neurons chosen by magnitude (2602.06183).

Each token goes to its nearest of E centroids, which are means of the up projection's rows: neurons and the inputs that
excite them live in the same space. Rows are dispatched by expert, and shuffled within one. Each block of v rows then
keeps 4 of every m neurons, those of largest norm over the block, and each token the 2 largest of those 4: V:2:M, or
Venom (2310.02065). Weights are 2:4 by soft threshold (2409.09099). The weight gradients are stochastic (2203.10991).

    up           H   = X W1^T      W1 2:4 along D, at all neurons
    down         O   = Y W2        Y V:2:M along F
    grad_hidden  dY  = dO W2^T     W2 2:4 along D, at kept neurons
    grad_input   dX  = dH W1       dH V:2:M along F, where Y is
    grad_up      dW1 = dH^T X      dH^T 2:4 along T, stochastic
    grad_down    dW2 = Y^T dO      Y^T 2:4 along T, stochastic

A block decides over tokens together. In training these come from a dispatched and shuffled batch; evaluation gives each
token its own neurons (v = 1), which is causal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from sparse_lm import ops
from sparse_lm.ops.row_order import dispatch
from sparse_lm.recipes import routing
from sparse_lm.recipes.base import FfnCall, InSlots, Recipe, Rule, Shape, Stats, hidden_stats
from sparse_lm.recipes.dense_slices import rules_of_m
from sparse_lm.recipes.slices import block_rules
from sparse_lm.recipes.soft_threshold import Scales, SoftThreshold24


class VenomState(NamedTuple):
    scale_up: Array  # f32[], beta of W1
    scale_down: Array  # f32[], beta of W2
    centroids: Array  # f32[E, D], of rows of W1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Venom(SoftThreshold24):
    """Trains with V:2:M activations, chosen by magnitude.

    Attributes:
      m: a block keeps 4 of every m neurons, and each token 2 of these.
      v: tokens of a block.
      experts: centroids by which tokens are dispatched.
    """

    m: int = 16
    v: int = 128
    experts: int = 16

    name = "venom"
    products: ClassVar = {
        "up": "W1 2:4",
        "down": "Y V:2:M",
        "grad_hidden": "W2 2:4",
        "grad_input": "dH V:2:M",
        "grad_up": "dH 2:4, stochastic",
        "grad_down": "Y 2:4, stochastic",
    }
    State = VenomState
    takes_order = True
    stochastic = True

    def rules(self, shape: Shape) -> Iterator[Rule]:
        yield from block_rules(self.v, shape)
        yield from rules_of_m(self.m, shape)
        yield "experts", 0 < self.experts <= shape.neurons, f"must be in 1..{shape.neurons}"

    def work(self) -> dict[str, float]:
        kept_share = 4 / self.m
        return super().work() | {product: 0.5 * kept_share for product in ("down", "grad_hidden", "grad_input")}

    def init_state(self, w1: Array, w2: Array) -> VenomState:
        scales: Scales = super().init_state(w1, w2)
        return VenomState(*scales, jnp.full((self.experts, w1.shape[1]), jnp.nan, jnp.float32))

    def enter(self, w1: Array, w2: Array, x: Array | None = None) -> tuple[VenomState, None]:
        self.check(w1, w2, x)
        return VenomState(*self.fit_scales(w1, w2), routing.cluster(w1, self.experts)), None

    def for_evaluation(self) -> Recipe:
        # No kernel takes blocks of one token.
        return dataclasses.replace(self, v=1, implementation=None)

    def forward(self, x: Array, ffn: FfnCall) -> tuple[Array, Stats, Any]:
        experts = routing.assign_tokens(x, ffn.state.centroids)
        rows = None  # a block of one token needs no order
        if self.v > 1:
            rows, _ = routing.dispatch_order(experts, self.experts, 1, ffn.order)
            x = dispatch(x, rows)
        with jax.named_scope("up"):
            h = ffn.w1.over_model(x)
        y, seen = ops.squared_relu_venom(h, self.v, self.m, implementation=ffn.implementation)
        with jax.named_scope("down"):
            o = ffn.w2.over_kept(y, rows)
        stats = hidden_stats(seen, x.shape[0], ffn.w1.neurons)
        return o, stats | {"expert_load": routing.expert_load(experts, self.experts)}, InSlots(x, (y, rows))

    def backward(self, x: Array, saved: Any, do: Array, ffn: FfnCall) -> tuple[Array, Array, Array]:
        y, rows = saved
        options: dict[str, Any] = dict(implementation=ffn.implementation)
        do = dispatch(do, rows)
        with jax.named_scope("grad_hidden"):
            dy = ffn.w2.at_neurons(do, y.kept_columns(), self.v)
        gradients = ops.squared_relu_gradients(dy, y, key=ffn.subkey(3), **options)
        with jax.named_scope("grad_input"):
            dx = ffn.w1.over_kept(gradients.dh, rows)
        with jax.named_scope("grad_up"):
            dw1 = ops.matmul_24(gradients.dh_t, x, out_dtype=ffn.gradient_dtype, **options)
        with jax.named_scope("grad_down"):
            dw2 = ops.matmul_24(gradients.y_t, do, out_dtype=ffn.gradient_dtype, **options)
        return dx, dw1, dw2
