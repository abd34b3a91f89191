"""`SquaredReluFFN`: a Flax NNX module whose six matrix products a recipe makes sparse for a part of training.

ffn = SquaredReluFFN(dim, neurons, Slices(m=16), rngs=rngs)
y = ffn(x)                                  # dense
order = ffn.enter(x)                        # from here on sparse; x: a batch of its inputs
opt_state = sort_moments(opt_state, nnx.state(model, nnx.Param), {("ffn",): order})
y = ffn(x, key=key)
ffn.leave(x)                                # dense again

It stands on `sparse_lm.recipes` alone, and so fits into any NNX model.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from sparse_lm.collectives import ONE_DEVICE, Axes
from sparse_lm.ops.activations import SQUARED_RELU
from sparse_lm.recipes import DENSE, Recipe, Slices
from sparse_lm.recipes.routing import sort_neurons

_SLICES = Slices()
_up_init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=-1, out_axis=-2)
_down_init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=-2, out_axis=-1)


class RecipeState(nnx.Variable):
    """An array that a recipe reads and does not train: centroids, scales, masks."""


class SquaredReluFFN(nnx.Module):
    """Computes relu(x up^T)^2 down, with `up` and `down` f32[F, D], densely or by a recipe.

    `state` has the recipe's arrays by name; they hold no values before `enter`. `sparse` is True between `enter` and
    `leave`. It is static: a step compiled with `nnx.jit` is compiled once a phase.
    """

    def __init__(self, dim: int, neurons: int, recipe: Recipe = _SLICES, *, rngs: nnx.Rngs):
        if not isinstance(recipe, Recipe):
            raise TypeError(f"recipe must be one such as Slices(m=16), not {recipe!r}")
        if dim < 1 or neurons < 1:
            raise ValueError(f"dim = {dim} and neurons = {neurons} must be positive")
        self.up = nnx.Param(_up_init(rngs.params(), (neurons, dim), jnp.float32))
        self.down = nnx.Param(_down_init(rngs.params(), (neurons, dim), jnp.float32))
        if recipe.activation != SQUARED_RELU or SQUARED_RELU not in recipe.computes:
            raise ValueError(
                f"recipe {recipe.name!r} with activation {recipe.activation!r} computes no squared-ReLU FFN"
            )
        recipe.check(self.up[...], self.down[...])
        self.recipe = recipe
        self.sparse = False
        state = recipe.init_state(self.up[...], self.down[...])
        self.state = nnx.Dict({name: RecipeState(value) for name, value in state._asdict().items()})

    def __call__(self, x: Array, *, key: Array | None = None, axes: Axes = ONE_DEVICE) -> Array:
        """Computes [..., D] -> [..., D] in the dtype of x; every leading axis is of tokens.

        Training a recipe needs a random key, another in each step and layer. Without one everything about a token is
        decided from that token alone, as evaluation wants it. `axes` are those of the mesh, under `shard_map`.
        """
        if not self.sparse:
            return DENSE.ffn(x, self.up[...], self.down[...], axes=axes)[0]
        recipe, order = self.recipe.for_evaluation(), None
        if key is not None:
            recipe = self.recipe
            # Neighbours in a text would otherwise choose together, and venom's blocks would see later tokens.
            order = jax.random.permutation(key, math.prod(x.shape[:-1])) if recipe.takes_order else None
        return recipe.ffn(x, self.up[...], self.down[...], self._state(), key=key, order=order, axes=axes)[0]

    def enter(self, x: Array | None = None) -> Array | None:
        """Enters the sparse phase and sorts the neurons.

        `x` [..., D] is a batch of this FFN's inputs; None will do unless `recipe.enter_reads_inputs`.

        Returns:
          int32[F], the order in which neurons now are, for `sort_moments`; None if they stay where they were.
        """
        self._require(sparse=False)
        state, order = self.recipe.enter(self.up[...], self.down[...], x)
        if order is not None:
            self.up[...], self.down[...] = self.up[...][order], self.down[...][order]
        self._set(state)
        self.sparse = True
        return order

    def refresh(self, x: Array | None = None) -> dict[str, Array]:
        """Brings the state up to date, every 40 steps or so if `recipe.refreshes`; returns what changed."""
        self._require(sparse=True)
        state, changed = self.recipe.refresh(self.up[...], self.down[...], self._state(), x)
        self._set(state)
        return changed

    def leave(self, x: Array | None = None) -> None:
        """Leaves the sparse phase, with the weights that the sparse forward used.

        `x` [..., D] is a batch of this FFN's inputs, to which a recipe that `leave_reads_inputs` fits them.
        """
        self._require(sparse=True)
        self.up[...], self.down[...] = self.recipe.leave(self.up[...], self.down[...], self._state(), x)
        self.sparse = False

    def adjust_gradients(self, up: Array, down: Array) -> tuple[Array, Array]:
        """Returns clipped gradients as the optimizer should see them: `fst` adds its masked decay."""
        if not self.sparse:
            return up, down
        return self.recipe.adjust_gradients(up, down, self.up[...], self.down[...], self._state())

    def _state(self) -> Any:
        return self.recipe.State(**{name: variable[...] for name, variable in self.state.items()})

    def _set(self, state: Any) -> None:
        for name, value in state._asdict().items():
            self.state[name][...] = value

    def _require(self, sparse: bool) -> None:
        if self.sparse != sparse:
            phase, other = ("sparse", "leave") if self.sparse else ("dense", "enter")
            raise ValueError(f"the FFN is {phase}: call {other} first")


Path = tuple[Hashable, ...]


def sort_moments(opt_state: Any, params: Any, orders: Mapping[Path, Array | None]) -> Any:
    """Puts what an optimizer keeps of neurons into their new order, and returns its state.

    Args:
      opt_state: of Optax for `params`, or the `opt_state` of an `nnx.Optimizer`.
      params: the tree of parameters, such as `nnx.state(model, nnx.Param)`.
      orders: from `enter`, by the path of the FFN among the parameters: {("blocks", 0, "ffn"): order}. Every parameter
        there must have a row for each neuron, or two with a gate.

    Raises:
      ValueError: a path that has no parameters, or some that its order does not fit; an array of the optimizer whose
        shape is not its parameter's, or one that may hold neurons and is no parameter's (`optax.flatten`).
    """
    shapes = {_path(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}
    order_of: dict[Path, Array | None] = {}
    for prefix, order in orders.items():
        below = [path for path in shapes if path[: len(prefix)] == tuple(prefix)]
        if not below:
            raise ValueError(f"no parameters are at {prefix!r}, but at {', '.join(map(str, list(shapes)[:3]))}, ...")
        order_of |= dict.fromkeys(below, order)
        if order is not None:
            rows = [(*order.shape[:-1], per_neuron * order.shape[-1]) for per_neuron in (1, 2)]
            if misfits := [f"{path} {[*shapes[path]]}" for path in below if shapes[path][:-1] not in rows]:
                allowed = f"[..., F, D], or [..., 2 F, D] with a gate, where their order {[*order.shape]} is [..., F]"
                raise ValueError(f"{', '.join(misfits)} must be {allowed}; a path may end with one parameter's name")
    fewest = min((order.shape[-1] for order in orders.values() if order is not None), default=math.inf)

    def sort(path: Any, leaf: Any) -> Any:
        path = _path(path)
        within = (path[first:last] for last in range(len(path), 0, -1) for first in range(last))
        parameter = next((part for part in within if part in shapes), None)
        if parameter is None and jnp.size(leaf) >= fewest and jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"{path} of the optimizer, of shape {leaf.shape}, is of no one parameter")
        if (order := order_of.get(parameter)) is None or leaf.size == 1:  # a number of the whole parameter
            return leaf
        if leaf.shape != shapes[parameter]:
            shape = f"{path} of the optimizer has shape {leaf.shape}, its parameter {shapes[parameter]}"
            raise ValueError(f"{shape}: only moments of a parameter's shape can be sorted, unlike factored ones")
        return sort_neurons(leaf, order)

    return jax.tree.map_with_path(sort, opt_state)


def _path(path: Any) -> Path:
    """Returns the names on the way to a leaf, without the ".value" of an NNX variable."""
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return tuple(getattr(part, "key", getattr(part, "idx", getattr(part, "name", None))) for part in path)
