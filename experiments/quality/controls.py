"""Recipes that are there to be compared with; `register` puts them beside those of sparse_lm."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from sparse_lm.recipes import RECIPES, Slices
from sparse_lm.recipes.base import Stats
from sparse_lm.recipes.slices import RoutedState


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedQuarter(Slices):
    """`Slices` without a router: all tokens compute the first slice, 1 / E of the neurons in the order they come in.

    No token is nearer to one centroid than to another if all are zero, and of equals the first is taken.
    """

    name = "fixed_quarter"
    leave_reads_inputs = False  # there is no other expert's token
    refreshes = False

    def enter(self, w1: Array, w2: Array, x: Array | None = None) -> tuple[RoutedState, None]:
        state, _ = super().enter(w1, w2, x)
        return state._replace(centroids=jnp.zeros_like(state.centroids)), None

    def refresh(self, w1: Array, w2: Array, state: RoutedState, x: Array | None = None) -> tuple[RoutedState, Stats]:
        return state, {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnturnedSlices(Slices):
    """`Slices` that leave with the weights of the sparse forward, whatever tokens of other experts then meet."""

    name = "unturned_slices"
    leave_reads_inputs = False


CONTROLS = FixedQuarter, UnturnedSlices


def register() -> None:
    """Makes the controls known to the configurations of this process."""
    RECIPES.update({control.name: control for control in CONTROLS})
