"""The FFN's two matrices within parameters and optimizer state, and what a recipe does to them there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from sparse_lm.model import mixture
from sparse_lm.model.llama import Params
from sparse_lm.recipes import Recipe

MATRICES = ("up", "down")
WATCHED = 128  # neurons of each weight whose 2:4 pattern is watched


def matrices(tree: Params) -> tuple[Array, Array]:
    """Returns W1 and W2 [L, F, D] of parameters, or of a tree of the same structure."""
    ffn = tree["layers"]["ffn"]
    return ffn["up"], ffn["down"]


def with_matrices(tree: Params, up: Array, down: Array) -> Params:
    """Returns parameters, or a tree of the same structure, with other W1 and W2."""
    layers = tree["layers"]
    return dict(tree, layers=dict(layers, ffn=dict(layers["ffn"], up=up, down=down)))


def with_dense_layers(old: Any, new: Any, dense_layers: int) -> Any:
    """Returns `new`, a tree of stacked arrays [L, ...], with the first layers of `old`, those that stay dense."""
    if not dense_layers:
        return new
    return jax.tree.map(lambda o, n: jnp.concatenate([o[:dense_layers], n[dense_layers:]]), old, new)


def balance(params: Params, load: Array, good: Array) -> Params:
    """Moves the routers' biases after a step, if that was good, by the loads f32[L, E] of its experts."""
    layers, ffn = params["layers"], params["layers"]["ffn"]
    moved = jnp.where(good, mixture.balanced(ffn[mixture.BIAS], load), ffn[mixture.BIAS])
    return dict(params, layers=dict(layers, ffn=dict(ffn, **{mixture.BIAS: moved})))


def adjust_gradients(recipe: Recipe, recipe_state: Any, dense_layers: int) -> optax.GradientTransformation:
    """Makes the recipe's change to the clipped gradients of all layers but the first, dense ones."""
    if type(recipe).adjust_gradients is Recipe.adjust_gradients:
        return optax.identity()

    def adjust(updates: Params, params: Params) -> Params:
        adjusted = jax.vmap(recipe.adjust_gradients)(*matrices(updates), *matrices(params), recipe_state)
        return with_matrices(updates, *with_dense_layers(matrices(updates), adjusted, dense_layers))

    return optax.stateless(adjust)


def patterns(params: Params, recipe: Recipe) -> dict[str, Array]:
    """Returns the 2:4 patterns of some evenly spaced neurons: bool[L, n, D] of each weight that 2:4 follows.

    Looking at all of them would take as long as a tenth of a sparse step.
    """
    if type(recipe).kept_weights is Recipe.kept_weights:  # whose neurons need not come in fours
        return {}
    return jax.vmap(recipe.kept_weights)(*map(_some_neurons, matrices(params)))


def watch(before: dict[str, Array], params: Params, recipe: Recipe, dense_layers: int) -> dict[str, Array]:
    """Compares patterns before a step with those of the parameters after it, within the step.

    Returns:
      "flip_rate" f32[L]: entries that the pattern gained or lost, as a share of all (2404.01847); and
      "kept_weight_energy" f32[L]: share of the sum of squares that it keeps. 0 and 1 of layers that stay dense.
      Nothing of a recipe whose patterns do not move with each step.
    """
    after = patterns(params, recipe)
    if not after:
        return {}

    def mean(values: list[Array], of_dense: float) -> Array:
        by_layer = jnp.mean(jnp.stack(values), axis=0)
        return jnp.where(jnp.arange(by_layer.shape[0]) < dense_layers, of_dense, by_layer)

    weights = dict(zip(MATRICES, map(_some_neurons, matrices(params)), strict=True))
    energy = {name: jnp.square(weights[name]) for name in after}
    flips = [jnp.mean(before[name] ^ kept, axis=(1, 2)) for name, kept in after.items()]
    sums = {name: jnp.maximum(jnp.sum(of, axis=(1, 2)), jnp.finfo(jnp.float32).tiny) for name, of in energy.items()}
    kept = [jnp.sum(energy[name] * kept, axis=(1, 2)) / sums[name] for name, kept in after.items()]
    return {"flip_rate": mean(flips, 0.0), "kept_weight_energy": mean(kept, 1.0)}


def _some_neurons(w: Array) -> Array:
    """Takes about `WATCHED` neurons of [L, F, D], evenly spaced in whole groups of four."""
    layers, neurons, dim = w.shape
    stride = max(1, neurons // WATCHED)
    return w.reshape(layers, neurons // 4, 4, dim)[:, ::stride].reshape(layers, -1, dim)
