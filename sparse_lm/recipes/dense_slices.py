"""The `dense_slices` recipe: each token computes its expert's slice of the neurons, densely, whatever the activation.

Routing is that of `slices`: each token goes to its nearest of E = m / 4 centroids, and neurons are sorted once by the
expert whose tokens use them most. Nothing is 2:4, so that the six products are grouped dense ones, on any GPU: those of
a mixture's experts in `dense`, of which each token has one.

    up           H   = X W1[slice]^T                grad_hidden  dY  = dO W2[slice]^T
    down         O   = Y W2[slice]                  grad_input   dX  = dH W1[slice]
                                                    grad_up      dW1[slice] += dH^T X
                                                    grad_down    dW2[slice] += Y^T dO

All six shrink to 1 / E. No product is sparse within a slice. With a gate, a slice of S neurons is 2 S contiguous rows
of W1, since a neuron's two stand side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from sparse_lm.ops.activations import ACTIVATIONS, activate
from sparse_lm.ops.row_order import dispatch
from sparse_lm.recipes import routing
from sparse_lm.recipes.base import PRODUCTS, FfnCall, InSlots, Recipe, Rule, Shape, Stats
from sparse_lm.recipes.dense import Dense
from sparse_lm.recipes.groups import Groups, fitting_block, group_by_expert
from sparse_lm.recipes.weight_forms import Weight, dense_forms


class Centroids(NamedTuple):
    centroids: Array  # f32[E, D]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseSlices(Recipe):
    """Trains each token with one of m / 4 slices of the neurons.

    Attributes:
      m: a token computes 4 of every m neurons; m / 4 is the number of experts.
      v: the most tokens of a block, as kernels take them. An expert's tokens are padded to whole blocks.
    """

    m: int = 16
    v: int = 256

    name = "dense_slices"
    products: ClassVar = dict.fromkeys(PRODUCTS, "none, at the expert's neurons")
    State: ClassVar[type] = Centroids
    computes = ACTIVATIONS
    takes_order = True
    enter_reads_inputs = True
    refreshes = True

    @property
    def experts(self) -> int:
        return self.m // 4

    def rules(self, shape: Shape) -> Iterator[Rule]:
        yield "v", self.v > 0, "must be positive"
        yield from rules_of_m(self.m, shape)
        allowed = f"must be at most 4 times the {shape.tokens} tokens of a microbatch"
        yield "m", not shape.tokens or self.experts <= shape.tokens, allowed

    def work(self) -> dict[str, float]:
        return dict.fromkeys(PRODUCTS, 1 / self.experts)

    def init_state(self, w1: Array, w2: Array) -> Any:
        return Centroids(jnp.full((self.experts, w1.shape[1]), jnp.nan, jnp.float32))

    def enter(self, w1: Array, w2: Array, x: Array | None = None) -> tuple[Any, Array]:
        self.check(w1, w2, x)
        x = routing.tokens_of(x, "enter(w1, w2, x)")
        centroids = routing.cluster(x, self.experts)
        y, _, _ = activate(x @ w1.astype(x.dtype).T, self.activation)
        return Centroids(centroids), routing.order_neurons(x, y, centroids, self.shards)

    def refresh(self, w1: Array, w2: Array, state: Any, x: Array | None = None) -> tuple[Any, Stats]:
        """Moves the centroids to where their tokens are. Neurons stay where they are."""
        self.check_entered(w1, w2, state, x)
        x = routing.tokens_of(x, "refresh(w1, w2, state, x)")
        return state._replace(centroids=routing.update_centroids(x, state.centroids)), {}

    def forward(self, x: Array, ffn: FfnCall) -> tuple[Array, Stats, Any]:
        experts = routing.assign_tokens(x, ffn.state.centroids)
        v = fitting_block(self.v, x.shape[0], self.experts)
        groups = group_by_expert(experts[:, None], self.experts, v, ffn.order)
        x = dispatch(x, groups.rows)
        o, stats, saved = Dense(activation=self.activation).forward_experts(x, self._of_experts(ffn, groups))
        o = jnp.where(jnp.isfinite(ffn.state.centroids).all(), o, jnp.nan)  # a state that was never entered
        return o, stats | {"expert_load": routing.expert_load(experts, self.experts)}, InSlots(x, (saved, groups))

    def backward(self, x: Array, saved: Any, do: Array, ffn: FfnCall) -> tuple[Array, Array, Array]:
        saved, groups = saved
        do, of_experts = dispatch(do, groups.rows), self._of_experts(ffn, groups)
        dx, dw1, dw2, _ = Dense(activation=self.activation).backward_experts(x, saved, do, of_experts)
        return dx, self._sorted(dw1, ffn, back=True), self._sorted(dw2, ffn, back=True)

    def _of_experts(self, ffn: FfnCall, groups: Groups) -> FfnCall:
        """Makes a mixture's call of an FFN's: each slice is an expert, and tokens choose one."""
        w1, w2 = self._sorted(ffn.w1.dense, ffn), self._sorted(ffn.w2.dense, ffn)
        up, down = (Weight(dense_forms(w[None], w.dtype), jnp.int32(0), ffn.implementation) for w in (w1, w2))
        return ffn._replace(w1=up, w2=down, groups=groups)

    def _sorted(self, w: Array, ffn: FfnCall, back: bool = False) -> Array:
        """Brings rows of weights whose neurons were sorted in several parts to the order of the experts, or back."""
        parts = self.parts(ffn.axes)
        outer, inner = (self.experts, parts) if back else (parts, self.experts)
        return w if parts == 1 else w.reshape(outer, inner, -1, w.shape[1]).swapaxes(0, 1).reshape(w.shape)


def rules_of_m(m: int, shape: Shape) -> Iterator[Rule]:
    """Yields what m must fulfil, of every m neurons of which 4 are computed."""
    yield "m", m >= 4 and m % 4 == 0, "must be a positive multiple of 4"
    yield "m", shape.neurons % m == 0, f"must divide the {shape.neurons} neurons"
