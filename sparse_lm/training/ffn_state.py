"""The FFN's two matrices within parameters and within optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import Array

from sparse_lm.model.llama import Params

MATRICES = ("up", "down")


def map_adam(opt_state: optax.OptState, function: Callable[[Any], Any]) -> optax.OptState:
    """The optimizer's state with `function` of its `optax.ScaleByAdamState`, wherever in the chain that is."""

    def is_adam(node: Any) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    return jax.tree.map(lambda node: function(node) if is_adam(node) else node, opt_state, is_leaf=is_adam)


def map_ffn(tree: Params, function: Callable[[Array], Array]) -> Params:
    """Parameters, or moments of the same structure, with `function` of `up` and of `down`, [L, F, D] each."""
    return with_ffn(tree, {name: function(tree["layers"]["ffn"][name]) for name in MATRICES})


def with_ffn(tree: Params, matrices: dict[str, Array]) -> Params:
    """Parameters, or moments of the same structure, with these FFN matrices by name; others stay."""
    layers = tree["layers"]
    return dict(tree, layers=dict(layers, ffn=dict(layers["ffn"], **matrices)))
