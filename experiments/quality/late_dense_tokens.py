"""Runs of `slices` in which a sixteenth of the tokens compute all neurons, but only late in the sparse phase.

Such tokens make the model fit to leave the phase, but they take time, and neurons specialise less. In a toy the last
fifth of the phase was enough (`experiments/results/leaving_cpu.json`). A run named "late_90" is the run "slices_90"
whose recipe is `partly_dense_slices` from there on. The second part compiles its sparse step anew.
"""

from __future__ import annotations

import dataclasses

from experiments.quality.suites import first_steps
from sparse_lm.config import Config
from sparse_lm.recipes import Slices
from sparse_lm.training.step import TrainState

PREFIX = "late_"
_SHARE = 0.2  # of the sparse phase


def first_part(config: Config, name: str) -> Config:
    """Returns the configuration of the steps up to there, in which all tokens are routed."""
    sparsity = config.sparsity
    steps = sparsity.end_step - round(_SHARE * (sparsity.end_step - sparsity.start_step))
    knobs = {field.name: getattr(sparsity.recipe, field.name) for field in dataclasses.fields(Slices)}
    routed = dataclasses.replace(sparsity, recipe=Slices(**knobs), end_step=steps, leave=False)
    return first_steps(config, steps, sparsity=routed)


def second_part(state: TrainState, first: Config, config: Config) -> TrainState:
    """Goes on with the same weights and centroids."""
    return state
