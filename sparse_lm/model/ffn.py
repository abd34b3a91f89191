"""The two feed-forward networks: squared ReLU, whose products a recipe computes, and SwiGLU, dense, for baselines.

Every matrix is neuron-major, [F, D]: what belongs to a neuron is one contiguous row in each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array

from sparse_lm.collectives import ONE_DEVICE, Axes, enter_tensor, leave_tensor, read
from sparse_lm.config import ModelConfig
from sparse_lm.model import initializers
from sparse_lm.recipes import Recipe
from sparse_lm.recipes.weight_forms import WeightForms


class FfnInputs(NamedTuple):
    """Holds what a layer's FFN reads besides its input and its own weights; see `Recipe.ffn`."""

    state: Any = None
    key: Array | None = None
    order: Array | None = None
    weights: tuple[WeightForms, WeightForms] | None = None
    layer: Array | int = 0


class SquaredReluFfn(nnx.Module):
    """relu(x up^T)^2 down (2109.08668): `up` and `down` f32[F, D]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.up = nnx.Param(initializers.matrix(rngs.params(), config.ffn_dim, config.dim))
        self.down = nnx.Param(_down(config, rngs))

    def __call__(
        self, x: Array, inputs: FfnInputs, *, recipe: Recipe, axes: Axes = ONE_DEVICE
    ) -> tuple[Array, dict[str, Array]]:
        """Computes [T, D] -> [T, D] and statistics by the recipe."""
        return recipe.ffn(x, self.up[...], self.down[...], **inputs._asdict(), axes=axes)


class SwiGluFfn(nnx.Module):
    """(silu(x gate^T) * x up^T) down (2002.05202): `gate`, `up` and `down` f32[F, D]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.gate = nnx.Param(initializers.matrix(rngs.params(), config.ffn_dim, config.dim))
        self.up = nnx.Param(initializers.matrix(rngs.params(), config.ffn_dim, config.dim))
        self.down = nnx.Param(_down(config, rngs))

    def __call__(
        self, x: Array, inputs: FfnInputs, *, recipe: Recipe, axes: Axes = ONE_DEVICE
    ) -> tuple[Array, dict[str, Array]]:
        """Computes [T, D] -> [T, D] and no statistics.

        Raises:
          ValueError: the recipe has sparse products.
        """
        if recipe.products:
            raise ValueError(f"SwiGLU has no sparse products: recipe {recipe.name!r} cannot compute it")
        gate, up, down = (read(w[...].astype(x.dtype), axes) for w in (self.gate, self.up, self.down))
        x = enter_tensor(x, axes)
        return leave_tensor(jax.nn.silu(x @ gate.T) * (x @ up.T) @ down, axes), {}


FFNS = {"squared_relu": SquaredReluFfn, "swiglu": SwiGluFfn}
"""The modules, by `ModelConfig.activation`."""


def _down(config: ModelConfig, rngs: nnx.Rngs) -> Array:
    return initializers.residual_matrix(rngs.params(), config.dim, config.ffn_dim, config.layers).T
