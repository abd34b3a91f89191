"""Depth growth, a rival that needs no sparsity: half of the layers train first, and are then stacked (2405.15319).

A run named "grown_50" trains half of the layers for 50% of the steps, at the rates of a run of all steps. Then every
layer stands twice, one whole stack behind the other, with its optimizer moments and what its recipe keeps, and all
layers train to the end. "grown_50_slices" does so in the sparse phase, which it leaves later.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from experiments.quality.suites import first_steps
from sparse_lm.config import Config
from sparse_lm.training.step import TrainState, make_trainer

PREFIX = "grown_"


def first_part(config: Config, name: str) -> Config:
    """Returns the configuration of the first part of a grown run: half of its layers, at a constant rate."""
    steps = round(int(name.removeprefix(PREFIX).partition("_")[0]) / 100 * config.steps)
    half = dataclasses.replace(config.model, layers=config.model.layers // 2)
    sparsity = config.sparsity
    if sparsity.end_step > steps:
        sparsity = dataclasses.replace(sparsity, end_step=steps, leave=False)
    return first_steps(config, steps, model=half, sparsity=sparsity)


def second_part(state: TrainState, config: Config) -> TrainState:
    """Stands every array that has a layer axis behind itself."""

    def stack(array: Array, wanted: jax.ShapeDtypeStruct) -> Array:
        array = array if array.shape == wanted.shape else jnp.concatenate([array, array])
        assert array.shape == wanted.shape
        return array

    return jax.tree.map(stack, state, make_trainer(config).abstract_state())
