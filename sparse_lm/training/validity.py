"""Whether sparse variables are ones that a run can have: what a checkpoint brings is checked before it is used."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from sparse_lm.config import Config
from sparse_lm.ops.ffn_weights import FfnVariables
from sparse_lm.training.recipe import sparse_plan


def check_variables(variables: FfnVariables, config: Config, step: int) -> None:
    """Checks the values, not the shapes, of the variables [L, ...] of the state after `step` steps.

    Before its first sparse step a run has the values of `init_variables`, which no product reads.

    Raises:
      ValueError: a mask is not 2:4 along both axes, a soft threshold's scale is not a positive number, a
        centre is not finite, or a cluster's neurons are not distinct ones of the layer, ascending, and
        four of each m where they do not come in runs.
    """
    if not config.sparsity.windows or step <= config.sparsity.windows[0][0]:
        return
    plan = sparse_plan(config.sparsity)
    if plan.weights == "transposable":
        _require(_transposable(variables.mask_up), "mask_up is not 2:4 along both axes")
        _require(_transposable(variables.mask_down), "mask_down is not 2:4 along both axes")
    if plan.weights == "soft_threshold":
        for name, scale in (("scale_up", variables.scale_up), ("scale_down", variables.scale_down)):
            _require(jnp.isfinite(scale) & (scale > 0), f"{name} is not a positive number")
    if plan.venom:
        _require(jnp.isfinite(variables.centroids).all(axis=(1, 2)), "centroids are not finite")
    if plan.pattern_known_first:
        neurons = config.model.ffn_dim
        columns = variables.columns  # [L, clusters, kept]
        ascending = (jnp.diff(columns, axis=-1) > 0).all(axis=(1, 2))
        within = ((columns >= 0) & (columns < neurons)).all(axis=(1, 2))
        _require(ascending & within, f"columns are not ascending numbers of the {neurons} neurons")
        if plan.run_length(neurons) == 1:
            of_group = jnp.repeat(jnp.arange(neurons // plan.m), 4)
            _require((columns // plan.m == of_group).all(axis=(1, 2)), f"columns are not four of each {plan.m}")


def _transposable(masks: Array) -> Array:
    """bool[L] for [L, M, N]: each 4 x 4 tile has two ones in every row and column."""
    layers, rows, columns = masks.shape
    tiles = masks.reshape(layers, rows // 4, 4, columns // 4, 4).astype(jnp.int8)
    return (tiles.sum(axis=2) == 2).all(axis=(1, 2, 3)) & (tiles.sum(axis=4) == 2).all(axis=(1, 2, 3))


def _require(valid: Array, message: str) -> None:
    """valid: bool[L]."""
    if not valid.all():
        raise ValueError(f"{message} in layer {int(jnp.argmin(valid))}")
