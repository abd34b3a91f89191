"""Recipes that are there to be compared with; `register` puts them beside those of sparse_lm."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from sparse_lm.collectives import ONE_DEVICE, Axes
from sparse_lm.recipes import DENSE, RECIPES, Slices
from sparse_lm.recipes.base import Stats
from sparse_lm.recipes.soft_threshold import thresholded
from sparse_lm.recipes.venom import RoutedState

_DENSE_TOKENS = 16  # one of so many


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
class PartlyDenseSlices(Slices):
    """`Slices`, but in training a sixteenth of the tokens compute all neurons, so that the model can leave the phase.

    After `Slices` every token meets neurons that never saw its like, and the loss jumps. Here they go on learning what
    to do with all tokens. They are the first tokens of the batch: whole sequences, or the beginning of one, whose
    tokens attend to no routed one. Weights are those that leaving would give, and gradients pass straight through.
    """

    name = "partly_dense_slices"

    def work(self) -> dict[str, float]:
        dense = 1 / _DENSE_TOKENS
        return {product: dense + (1 - dense) * share for product, share in super().work().items()}

    def ffn(
        self,
        x: Array,
        w1: Array,
        w2: Array,
        state: Any = None,
        *,
        order: Array | None = None,
        axes: Axes = ONE_DEVICE,
        **rest: Any,
    ) -> tuple[Array, Stats]:
        if order is None:  # as in evaluation
            return super().ffn(x, w1, w2, state, axes=axes, **rest)
        tokens = x.reshape(-1, x.shape[-1])
        first = len(tokens) // _DENSE_TOKENS
        routed = order[jnp.argsort(order < first, stable=True)][: len(tokens) - first] - first
        o, stats = super().ffn(tokens[first:], w1, w2, state, order=routed, axes=axes, **rest)
        as_left = (w + lax.stop_gradient(t - w) for w, t in zip((w1, w2), thresholded(w1, w2, state), strict=True))
        dense = dataclasses.replace(DENSE, activation=self.activation, precision=self.precision)
        o_dense, _ = dense.ffn(tokens[:first], *as_left, axes=axes)
        return jnp.concatenate([o_dense, o]).reshape(x.shape), stats


def register() -> None:
    """Makes the controls known to the configurations of this process."""
    RECIPES.update({control.name: control for control in (FixedQuarter, PartlyDenseSlices)})
