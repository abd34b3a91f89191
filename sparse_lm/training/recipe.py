"""From the configuration's recipe to the plan of the six FFN products, and whether this machine can compute it."""

from __future__ import annotations

import dataclasses

from sparse_lm.config import ConfigError, SparsityConfig
from sparse_lm.ops import backends
from sparse_lm.ops.plan import DH_MVUE, RECIPES, Y_MVUE, GemmPlan


def sparse_plan(sparsity: SparsityConfig) -> GemmPlan:
    """The plan of the sparse phase: the recipe with the configuration's knobs."""
    plan = dataclasses.replace(RECIPES[sparsity.recipe], dense_weights=sparsity.dense_weights)
    match sparsity.recipe:
        case "act24":
            return dataclasses.replace(
                plan, dense_features=sparsity.dense_features, shuffle_tokens=sparsity.shuffle_tokens
            )
        case "venom":
            if sparsity.weight_gradients == "mvue":
                plan = dataclasses.replace(plan, grad_up=DH_MVUE, grad_down=Y_MVUE)
            return dataclasses.replace(
                plan,
                selection=sparsity.selection,
                v=sparsity.v,
                m=sparsity.m,
                columns=sparsity.columns,
                clusters=sparsity.clusters,
                neuron_run=sparsity.neuron_run,
                distance=sparsity.distance,
            )
        case _:
            return plan


def check_implementation(sparsity: SparsityConfig) -> None:
    """Refuses `sparsity.implementation` by name if this machine cannot run it."""
    name = sparsity.implementation
    reason = backends.unavailable(name) if name else None
    if reason:
        raise ConfigError("sparsity.implementation", name, reason)
