"""The `slices` recipe: all six products sparse, at neurons that are known before the up product (after 2602.06183).

Each token goes to its nearest of E = m / 4 centroids, which k-means places among the FFN's inputs. Neurons are sorted
once by the expert whose tokens use them most, so that an expert's S = F / E neurons are contiguous. A token computes
its expert's slice and nothing else, 2:4 inside it: V:2:M activations whose V rows are the expert's tokens, decided from
each token alone, hence causal. All six products shrink to 1 / E, and then by 2:4.

Weights are 2:4 by soft threshold (2409.09099). The weight gradients are stochastic (2203.10991). Every
`sparsity.refresh_every` steps a centroid moves to the mean of the tokens that it was nearest to. The products stand in
block_products.py, since `experts24` has the same:

    up           Y   = relu(X W1[slice]^T)^2    W1 2:4 along D; Y 2:4 along S in the same kernel
    down         O   = Y W2[slice]              Y 2:4 along S
    grad_hidden  dY  = dO W2[slice]^T           W2 2:4 along D
    grad_input   dX  = dH W1[slice]             dH 2:4 along S, where Y is
    grad_up      dW1[slice] += dH^T X           dH^T 2:4 along T, stochastic
    grad_down    dW2[slice] += Y^T dO           Y^T 2:4 along T, stochastic

Bytes that move around the products on Hopper, bf16: dispatching X and dO moves 4 T D each; the up product writes Y,
1.125 T S; one pass reads 3.125 T S and writes dH and both transposes, 3.25 T S. O and dX are combined as the products
store them.

With the gate relu(G)^2, `gated_relu2`, Y = relu(G)^2 U is as sparse, and all nine products are 2:4. Gates that
leave no zeros are for `dense_slices`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from sparse_lm import collectives
from sparse_lm.ops.row_order import RowOrder, dispatch
from sparse_lm.recipes import block_products, routing
from sparse_lm.recipes.activations import SQUARED_RELU, activate
from sparse_lm.recipes.base import FfnCall, Stats, hidden_stats
from sparse_lm.recipes.checks import Rule, Shape
from sparse_lm.recipes.differentiable import InSlots
from sparse_lm.recipes.soft_threshold import Scales, SoftThreshold24, soft_threshold
from sparse_lm.recipes.venom import RoutedState, block_rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slices(SoftThreshold24):
    """Trains each token with one of m / 4 slices of the neurons, 2:4 inside.

    Attributes:
      m: a token computes 4 of every m neurons, and keeps 2 of these; m / 4 is the number of experts.
      v: tokens of a block, as kernels take them. An expert's tokens are padded to whole blocks.
    """

    m: int = 16
    v: int = 256

    name = "slices"
    products: ClassVar = {
        "up": "W1 2:4, at the expert's neurons",
        "down": "Y V:2:M",
        "grad_hidden": "W2 2:4, at the expert's neurons",
        "grad_input": "dH V:2:M",
        "grad_up": "dH 2:4, stochastic, at the expert's neurons",
        "grad_down": "Y 2:4, stochastic, at the expert's neurons",
    }
    State = RoutedState
    computes = (SQUARED_RELU, "gated_relu2")
    sparse_along_inputs = ("up",)
    takes_order = True
    stochastic = True
    enter_reads_inputs = True
    refreshes = True

    @property
    def experts(self) -> int:
        return self.m // 4

    def rules(self, shape: Shape) -> Iterator[Rule]:
        yield from block_rules(self.v, self.m, shape)
        allowed = f"must be at most 4 times the {shape.tokens} tokens of a microbatch"
        yield "m", self.m, not shape.tokens or self.experts <= shape.tokens, allowed

    def work(self) -> dict[str, float]:
        return {product: 0.5 / self.experts for product in self.products}

    def init_state(self, w1: Array, w2: Array) -> RoutedState:
        scales: Scales = super().init_state(w1, w2)
        return RoutedState(*scales, jnp.full((self.experts, w1.shape[1]), jnp.nan, jnp.float32))

    def enter(self, w1: Array, w2: Array, x: Array | None = None) -> tuple[RoutedState, Array]:
        self.check(w1, w2, x)
        x = routing.tokens_of(x, "enter(w1, w2, x)")
        scales, centroids = self.fit_scales(w1, w2), routing.cluster(x, self.experts)
        w1_sparse = (scales.scale_up * soft_threshold(w1)).astype(x.dtype)
        y, _, _ = activate(x @ w1_sparse.T, self.activation)
        owner = routing.assign_neurons(routing.expert_energy(x, y, centroids))
        return RoutedState(*scales, centroids), routing.sort_by_expert(owner, self.experts, self.shards)

    def refresh(self, w1: Array, w2: Array, state: RoutedState, x: Array | None = None) -> tuple[RoutedState, Stats]:
        """Moves the centroids to where their tokens are. Neurons stay where they are."""
        x = routing.tokens_of(x, "refresh(w1, w2, state, x)")
        return state._replace(centroids=routing.update_centroids(x, state.centroids)), {}

    def forward(self, x: Array, ffn: FfnCall) -> tuple[Array, Stats, Any]:
        tokens, neurons = x.shape[0], ffn.w2.neurons
        experts = routing.assign_tokens(x, ffn.state.centroids)
        rows, block_experts = routing.dispatch_order(experts, self.experts, self.v, ffn.order)
        neuron_ids, contiguous = self._neuron_ids(rows, block_experts, tokens, ffn)
        blocks = block_products.Blocks(neuron_ids, rows, self.v, contiguous)
        x = dispatch(x, rows)
        o, hidden, seen = block_products.forward(x, blocks, ffn)
        stats = hidden_stats(seen, tokens, neurons // self.experts)
        return o, stats | {"expert_load": routing.expert_load(experts, self.experts)}, InSlots(x, (hidden, rows))

    def backward(self, x: Array, saved: Any, do: Array, ffn: FfnCall) -> tuple[Array, Array, Array]:
        hidden, rows = saved
        dx, dw1, dw2, _ = block_products.backward(x, hidden, dispatch(do, rows), rows, ffn)
        return dx, dw1, dw2

    def _neuron_ids(self, rows: RowOrder, block_experts: Array, tokens: int, ffn: FfnCall) -> tuple[Array, int]:
        """Lists the neurons of each block of slots, int32 [Tp / v, S], and says how many at a time are contiguous.

        A block without tokens lists F throughout, no neuron, and products skip it.
        """
        neurons = ffn.w2.neurons
        parts = self.shards // collectives.size(ffn.axes.tensor)
        ids = routing.slice_ids(neurons, self.experts, parts)[block_experts]
        has_token = rows.slots[:: self.v, None] < tokens  # a block is filled from its first slot on
        return jnp.where(has_token, ids, neurons), neurons // self.experts // parts
