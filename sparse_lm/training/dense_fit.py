"""Makes a dense model of one in its sparse phase, by least squares on some of the run's text."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from sparse_lm.config import Config
from sparse_lm.model import llama
from sparse_lm.model.llama import Params
from sparse_lm.recipes.least_squares import fit_dense
from sparse_lm.training import ffn_weights
from sparse_lm.training.run_data import device_batches, open_run_data
from sparse_lm.training.transitions import ffn_inputs

TOKENS = 16  # for each neuron, at least; with fewer the fit is worse


def fit_dense_params(
    workdir: str | os.PathLike, config: Config, params: Params, recipe_state: Any, step: int
) -> Params:
    """Returns the parameters of the dense model that comes closest to the sparse one of `step`, layer by layer.

    It is fitted to what the recipe computes on the batches that training would read next. Raises DataError if the run's
    data cannot be read.
    """
    recipe, graphdef = config.sparsity.recipe, llama.graphdef(config.model)
    record = functools.partial(ffn_inputs, recipe=recipe, config=config, graphdef=graphdef, layout=None)
    record = functools.partial(jax.jit(record), params, recipe_state)
    inputs = map(record, device_batches(open_run_data(workdir, config), config, None, step))
    x = [next(inputs)]
    while len(x) * x[0].shape[1] < TOKENS * config.model.ffn_dim:
        x.append(next(inputs))

    def fit(params: Params, recipe_state: Any, x: Array) -> Params:
        matrices = ffn_weights.matrices(params)
        fitted = lax.map(lambda layer: fit_dense(recipe, *layer), (*matrices, recipe_state, x))
        return ffn_weights.with_matrices(
            params, *ffn_weights.with_dense_layers(matrices, fitted, config.sparsity.dense_layers)
        )

    return jax.jit(fit)(params, recipe_state, jnp.stack(x, axis=1))
