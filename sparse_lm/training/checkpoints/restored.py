"""A trained model from its workdir, as dense or as sparse products read it."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import jax

from sparse_lm.config import Config
from sparse_lm.errors import WorkdirError
from sparse_lm.model.llama import Params
from sparse_lm.recipes import DENSE, Recipe
from sparse_lm.training.checkpoints.checkpoint import restore_params
from sparse_lm.training.environment import check_precision
from sparse_lm.training.ffn_weights import matrices
from sparse_lm.training.transitions import dense_params
from sparse_lm.training.workdir import meaning

_log = logging.getLogger(__name__)


def restore_for_dense(
    workdir: str | os.PathLike, config: Config, checkpoint: int | str = "latest"
) -> tuple[Params, int]:
    """Restores parameters and step of a checkpoint; raises WorkdirError if there is none, or its model is a sparse one.

    If it is of the sparse phase, the FFN weights are those that the run would leave the phase with, but for neurons
    that it would turn away: the master weights alone are not what was trained.
    """
    params, recipe, _, step = restore_model(workdir, config, checkpoint)
    if recipe is not DENSE:
        reason = f"the model of step {step} computes its FFNs by recipe {recipe.name!r} for good "
        reason += "(sparsity.leave = False), and dense FFNs with its weights are another model"
        raise WorkdirError(workdir, reason)
    return params, step


def restore_for_sparse(workdir: str | os.PathLike, config: Config, checkpoint: int | str) -> tuple[Params, Any, int]:
    """Restores parameters, the recipe's state and step of a checkpoint.

    Outside the sparse phase, what of the state follows from the weights, such as scales, is that of the weights as they
    are; masks and experts are the last phase's. Raises WorkdirError if no sparse phase is before the checkpoint.
    """
    params, recipe_state, step = _restore(workdir, config, checkpoint)
    phase = config.sparsity.phase
    if not phase:
        raise WorkdirError(workdir, "--sparse needs a run with a sparse phase; this one is dense throughout")
    if step <= phase.start:
        reason = f"--sparse needs a checkpoint after step {phase.start}, where the sparse phase starts; got {step}"
        raise WorkdirError(workdir, reason)
    if config.phase(step - 1) == "dense":
        recipe_state = jax.jit(jax.vmap(config.sparsity.recipe.refit))(*matrices(params), recipe_state)
    return params, recipe_state, step


def restore_model(
    workdir: str | os.PathLike, config: Config, checkpoint: int | str = "latest"
) -> tuple[Params, Recipe, Any, int]:
    """Restores a checkpoint as the model that it is: parameters, recipe that computes the FFNs, its state, and step.

    The model is dense, but for one of a run that stays in its sparse phase (`sparsity.leave` is False).
    """
    params, recipe_state, step = _restore(workdir, config, checkpoint)
    if config.phase(step - 1) == "dense":
        return params, DENSE, None, step
    if config.sparsity.stays:
        return params, config.sparsity.recipe, recipe_state, step
    if step < config.steps:
        _log.warning("step %d is of the sparse phase: FFNs are computed densely, which dense steps are to follow", step)
    # Of a run that ended in the phase, and has left it, these are the weights as they are.
    params = jax.jit(functools.partial(dense_params, sparsity=config.sparsity))(params, recipe_state)
    return params, DENSE, None, step


def _restore(workdir: str | os.PathLike, config: Config, checkpoint: int | str) -> tuple[Params, Any, int]:
    """Reads a checkpoint; raises ConfigError if this machine does not compute in the model's precision."""
    check_precision(config.model.precision)
    params, by_name, step = restore_params(workdir, checkpoint, run=meaning(config))
    return params, config.sparsity.recipe.State(**by_name) if config.sparsity.phase else None, step
