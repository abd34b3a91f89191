"""Runs of `slices` in two stages: half as many neurons a token at first, as few serve while a run is young.

A run named "stages_80" is the run "slices_80" with twice its m for the first 40% of the steps. Then each layer's
tokens, as the first stage computes them, are clustered anew, and its neurons sorted for half as many experts. What that
takes between the two stages, some steps' time and its compilation, is in no number of the run.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import Array

from experiments.quality.suites import first_steps
from sparse_lm.config import Config
from sparse_lm.data.opening import open_data
from sparse_lm.model.llama import Params
from sparse_lm.training.run_data import device_batches
from sparse_lm.training.step import TrainState, make_trainer
from sparse_lm.training.transitions import enter_sparse, ffn_inputs

PREFIX = "stages_"
_SHARE = 0.4  # of the steps, of the first stage with those before it


def first_part(config: Config, name: str) -> Config:
    """Returns the configuration of the first stage, which is not left."""
    steps = round(_SHARE * config.steps)
    recipe = dataclasses.replace(config.sparsity.recipe, m=2 * config.sparsity.recipe.m)
    sparsity = dataclasses.replace(config.sparsity, recipe=recipe, end_step=steps, leave=False)
    return first_steps(config, steps, sparsity=sparsity)


def second_part(state: TrainState, first: Config, config: Config) -> TrainState:
    """Enters the second stage with the batch of its first step."""
    trainer = make_trainer(first)

    def recorded(params: Params, recipe_state: Any, windows: Array, _: Any) -> Array:
        recipe = first.sparsity.recipe
        return ffn_inputs(params, recipe_state, windows, recipe, config=first, graphdef=trainer.graphdef, layout=None)

    windows = next(device_batches(open_data(config), config, None, first.steps))
    enter = functools.partial(enter_sparse, recipe=config.sparsity.recipe, recorded=recorded)
    return jax.jit(enter)(state, windows)
