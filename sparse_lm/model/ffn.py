"""The feed-forward networks, with squared ReLU or with a gate, whose products a recipe computes.

Every matrix is neuron-major, [F, D]: what belongs to a neuron is one contiguous row in each.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from flax import nnx
from jax import Array

from sparse_lm.collectives import ONE_DEVICE, Axes
from sparse_lm.config import ModelConfig
from sparse_lm.model import initializers
from sparse_lm.ops.activations import rows_per_neuron
from sparse_lm.recipes import Recipe
from sparse_lm.recipes.weight_forms import WeightForms


class FfnInputs(NamedTuple):
    """Holds what a layer's FFN reads besides its input and its own weights; see `Recipe.ffn`."""

    state: Any = None
    key: Array | None = None
    order: Array | None = None
    weights: tuple[WeightForms, WeightForms] | None = None
    layer: Array | int = 0


class Ffn(nnx.Module):
    """relu(x up^T)^2 down (2109.08668), with `up` and `down` f32[F, D]; or with a gate (2002.05202).

    That is (act(x G^T) * x U^T) down, where `up` f32[2 F, D] has rows of G and of U by turns, so that both rows of a
    neuron are side by side.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.activation, self.precision = config.activation, config.precision
        rows = rows_per_neuron(config.activation) * config.ffn_dim
        self.up = nnx.Param(initializers.matrix(rngs.params(), rows, config.dim))
        self.down = nnx.Param(initializers.residual_matrix(rngs.params(), config.dim, config.ffn_dim, config.layers).T)

    def __call__(
        self, x: Array, inputs: FfnInputs, *, recipe: Recipe, axes: Axes = ONE_DEVICE
    ) -> tuple[Array, dict[str, Array]]:
        """Computes [T, D] -> [T, D] and statistics by the recipe, which refuses an activation that it does not know."""
        recipe = dataclasses.replace(recipe, activation=self.activation, precision=self.precision)
        return recipe.ffn(x, self.up[...], self.down[...], **inputs._asdict(), axes=axes)
