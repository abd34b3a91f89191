"""A trained model from its workdir, as dense or as sparse products read it."""

from __future__ import annotations

import os

import jax

from sparse_lm.config import Config
from sparse_lm.model.llama import Params
from sparse_lm.ops.ffn_weights import FfnVariables
from sparse_lm.training.checkpoints.checkpoint import restore_params
from sparse_lm.training.recipe import sparse_plan
from sparse_lm.training.transitions import dense_params, fix_scales
from sparse_lm.training.validity import check_variables
from sparse_lm.training.workdir import WorkdirError, meaning


def restore_for_dense(
    workdir: str | os.PathLike, config: Config, checkpoint: int | str = "latest"
) -> tuple[Params, int]:
    """Parameters and step of a checkpoint. If it is of the sparse phase, the FFN weights are those that
    the run would leave the phase with: the master weights alone are not what was trained.

    Raises:
      WorkdirError: there is no such checkpoint.
    """
    params, variables, step = _restore(workdir, config, checkpoint)
    if is_sparse(config, step):
        bake = jax.jit(dense_params, static_argnums=(2, 3))
        params = bake(params, variables, sparse_plan(config.sparsity), config.sparsity.dense_layers)
    return params, step


def restore_for_sparse(
    workdir: str | os.PathLike, config: Config, checkpoint: int | str = "latest"
) -> tuple[Params, FfnVariables, int]:
    """Parameters, sparse variables and step of a checkpoint. Outside the sparse phase, beta is that of
    the weights as they are; masks and neuron sets are the last phase's.

    Raises:
      WorkdirError: there is no such checkpoint, or no sparse phase before it.
    """
    params, variables, step = _restore(workdir, config, checkpoint)
    windows = config.sparsity.windows
    if not windows:
        raise WorkdirError(workdir, "--sparse needs a run with a sparse phase; this one is dense throughout")
    if step <= windows[0][0]:
        reason = f"--sparse needs a checkpoint after step {windows[0][0]}, where the sparse phase starts; got {step}"
        raise WorkdirError(workdir, reason)
    plan = sparse_plan(config.sparsity)
    if plan.weights == "soft_threshold" and not is_sparse(config, step):
        variables = fix_scales(variables, params["layers"]["ffn"], plan)
    return params, variables, step


def _restore(workdir: str | os.PathLike, config: Config, checkpoint: int | str) -> tuple[Params, FfnVariables, int]:
    params, by_name, step = restore_params(workdir, checkpoint, run=meaning(config))
    variables = FfnVariables(**by_name)
    try:
        check_variables(variables, config, step)
    except ValueError as error:
        raise WorkdirError(workdir, f"checkpoint {step} cannot be used: {error}") from error
    return params, variables, step


def is_sparse(config: Config, step: int) -> bool:
    """Whether the state after `step` steps is one of the sparse phase, or that of a run which ended in it: having
    left it, that has weights which its sparse forward uses as they are."""
    return step > 0 and config.phase(step - 1) == "sparse"
