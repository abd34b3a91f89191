"""Refuses, by name, what a recipe does not compute: activations, shapes and dtypes of arrays, knobs, and states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from sparse_lm.collectives import ONE_DEVICE, Axes
from sparse_lm.recipes.activations import rows_per_neuron

if TYPE_CHECKING:
    from sparse_lm.recipes.base import Recipe

Rule = tuple[str, Any, bool, str]
"""(knob, value, is it allowed, what is allowed)."""


class Shape(NamedTuple):
    """Sizes that a recipe's knobs must fit."""

    dim: int  # D
    neurons: int  # F
    tokens: int = 0  # T of one call: a microbatch on one device; 0 for any


def check_activation(recipe: Recipe, activations: tuple[str, ...], what: str) -> None:
    """Refuses the recipe's activation unless it is one of those with which the recipe computes FFNs, or experts."""
    if recipe.activation not in activations:
        known = f"{what} with {', '.join(activations)}, not {recipe.activation}" if activations else f"no {what}"
        raise ValueError(f"recipe {recipe.name!r} computes {known}")


def check_arrays(recipe: Recipe, w1: Array, w2: Array, x: Array | None) -> None:
    """Refuses arrays whose shapes do not fit together, or that are not of floats."""
    rows = "F" if (per_neuron := rows_per_neuron(recipe.activation)) == 1 else f"{per_neuron} F"
    shapes = f"w1 {[*w1.shape]} and w2 {[*w2.shape]}"
    if w2.ndim != 2 or w1.shape != (per_neuron * w2.shape[0], w2.shape[1]):
        raise ValueError(f"{shapes} must be [{rows}, D] and [F, D] with activation {recipe.activation!r}")
    if x is not None and x.shape[-1:] != w2.shape[1:]:
        raise ValueError(f"x {[*x.shape]} must be [..., D]; {shapes} are [{rows}, D] and [F, D]")
    for name, array in (("w1", w1), ("w2", w2), ("x", x)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} is {array.dtype}: must be of a dtype of floats")


def check_knobs(recipe: Recipe, neurons: int, dim: int) -> None:
    """Refuses knobs, and sizes, that no FFN of this recipe has."""
    for knob, value, ok, allowed in recipe.rules(Shape(dim, neurons)):
        if not ok:
            raise ValueError(f"{knob} = {value!r} of recipe {recipe.name!r}: {allowed}")
    if (recipe.products and neurons % 4) or (recipe.sparse_weights and dim % 4):
        raise ValueError(f"w2 {[neurons, dim]}, [F, D], must have multiples of 4 for recipe {recipe.name!r}")


def check_state(recipe: Recipe, state: Any, w1: Array, w2: Array, axes: Axes) -> None:
    """Refuses a state that the recipe did not make, or, on one device, made with other knobs or weights."""
    if not isinstance(state, recipe.State):
        raise ValueError(f"recipe {recipe.name!r} reads a state: make one with enter(w1, w2, x)")
    if axes == ONE_DEVICE:
        for name, array in jax.eval_shape(recipe.init_state, w1, w2)._asdict().items():
            if (given := getattr(state, name).shape) != array.shape:
                raise ValueError(
                    f"{name} {[*given]} of the state must be {[*array.shape]} for this recipe and w1 {[*w1.shape]}:"
                    " enter it with the same knobs and weights"
                )
