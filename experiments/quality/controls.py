"""Recipes that are there to be compared with; `register` puts them beside those of sparse_lm."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from sparse_lm.recipes import RECIPES, Slices, block_products, routing
from sparse_lm.recipes.activations import SQUARED_RELU
from sparse_lm.recipes.base import FfnCall, Stats, hidden_stats
from sparse_lm.recipes.groups import group_by_expert
from sparse_lm.recipes.venom import RoutedState


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedQuarter(Slices):
    """`Slices` without a router: all tokens compute the first slice, 1 / E of the neurons in the order they come in.

    No token is nearer to one centroid than to another if all are zero, and of equals the first is taken.
    """

    name = "fixed_quarter"
    refreshes = False

    def enter(self, w1: Array, w2: Array, x: Array | None = None) -> tuple[RoutedState, None]:
        state, _ = super().enter(w1, w2, x)
        return state._replace(centroids=jnp.zeros_like(state.centroids)), None

    def refresh(self, w1: Array, w2: Array, state: RoutedState, x: Array | None = None) -> tuple[RoutedState, Stats]:
        return state, {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeveralSlices(Slices):
    """`Slices` of which a token computes several, those of its nearest centroids, and sums what they add.

    With m = 32 and two slices a token computes a quarter of the neurons, as with m = 16 and one.

    Attributes:
      choices: slices of a token.
    """

    choices: int = 2

    name = "several_slices"
    computes = (SQUARED_RELU,)

    def work(self) -> dict[str, float]:
        return {product: self.choices * share for product, share in super().work().items()}

    def forward(self, x: Array, ffn: FfnCall) -> tuple[Array, Stats, Any]:
        neurons = ffn.w2.neurons
        chosen = lax.top_k(routing.closeness(x, ffn.state.centroids), self.choices)[1]
        groups = group_by_expert(chosen, self.experts, self.v, ffn.order)
        ids = routing.slice_ids(neurons, self.experts, 1)[groups.block_experts]
        ids = jnp.where(groups.blocks_with_pairs()[:, None], ids, neurons)
        blocks = block_products.Blocks(ids, groups.rows, self.v, neurons // self.experts)
        o, hidden, seen = block_products.forward(groups.dispatch(x), blocks, ffn)
        stats = hidden_stats(seen, groups.pairs, neurons // self.experts)
        load = routing.expert_load(chosen.reshape(-1), self.experts)
        return groups.combine(o), stats | {"expert_load": load}, (hidden, groups)

    def backward(self, x: Array, saved: Any, do: Array, ffn: FfnCall) -> tuple[Array, Array, Array]:
        hidden, groups = saved
        x, do = groups.dispatch(x), groups.dispatch(do)
        dx, dw1, dw2, _ = block_products.backward(x, hidden, do, groups.rows, ffn)
        return groups.combine(dx), dw1, dw2


def register() -> None:
    """Makes the controls known to the configurations of this process."""
    for recipe in (FixedQuarter, SeveralSlices):
        RECIPES[recipe.name] = recipe
