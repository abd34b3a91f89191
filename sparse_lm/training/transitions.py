"""Takes the training state from a dense to a sparse step and back, and refreshes it while sparse.

  enter    before the first sparse step: the recipe chooses masks, scales or experts;
  refresh  every `refresh_every` sparse steps: it chooses some of that anew;
  leave    before the first dense step: the weights become what the sparse forward used. The loss just after is
           what it was just before if the recipe left out no activations; otherwise it jumps, as they come back. A
           recipe may fit the weights to the batch, so that it jumps less.
           To leave twice, as a run does that is made longer after its end, changes nothing.

All three are pure functions of the state and a batch, so that a resumed run does the same. They run the
recipe's functions of arrays layer by layer, on inputs that one forward pass of the coming step's batch records.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from sparse_lm.collectives import ONE_DEVICE, Axes
from sparse_lm.config import Config, SparsityConfig
from sparse_lm.model.llama import Params
from sparse_lm.nn import sort_moments
from sparse_lm.recipes import DENSE, Recipe
from sparse_lm.training import ffn_weights
from sparse_lm.training.ffn_weights import matrices
from sparse_lm.training.mesh.layout import BATCH, Layout
from sparse_lm.training.step import Metrics, Step, TrainState, compiled, forward_loss

SAMPLE = 16_384  # tokens of a batch, of evenly spaced windows, that a recipe sees


def make_transitions(config: Config, graphdef: Any, layout: Layout | None = None) -> dict[str, Step]:
    """Makes the transitions of a run, by the names above; `layout` is None on one device.

    Each is a function (state, windows) -> (state, metrics), compiled on first use, where windows int32[B, S + 1] are
    the batch of the coming step. States are donated.
    """
    sparsity, recipe = config.sparsity, config.sparsity.recipe
    recorded = functools.partial(_ffn_inputs, config=config, graphdef=graphdef, layout=layout)

    def enter(state: TrainState, windows: Array) -> tuple[TrainState, Metrics]:
        x = recorded(state, windows, DENSE) if recipe.enter_reads_inputs else None
        recipe_state, order = lax.map(lambda layer: recipe.enter(*layer), (*matrices(state.params), x))
        state = dataclasses.replace(state, recipe_state=recipe_state)
        if order is None:
            return state, {}
        # Neurons move with their moments, so that the function computed stays.
        orders = {("layers", "ffn", name): order for name in ffn_weights.MATRICES}
        params, opt_state = sort_moments((state.params, state.opt_state), state.params, orders)
        return dataclasses.replace(state, params=params, opt_state=opt_state), {}

    def refresh(state: TrainState, windows: Array) -> tuple[TrainState, Metrics]:
        x = recorded(state, windows, recipe) if recipe.enter_reads_inputs else None
        new, metrics = lax.map(lambda layer: recipe.refresh(*layer), (*matrices(state.params), state.recipe_state, x))
        none = jax.tree.map(jnp.zeros_like, metrics)
        metrics = ffn_weights.with_dense_layers(none, metrics, sparsity.dense_layers)  # where nothing is chosen anew
        recipe_state = ffn_weights.with_dense_layers(state.recipe_state, new, sparsity.dense_layers)
        return dataclasses.replace(state, recipe_state=recipe_state), metrics

    def leave(state: TrainState, windows: Array) -> tuple[TrainState, Metrics]:
        x = recorded(state, windows, recipe) if recipe.leave_reads_inputs else None
        params = dense_params(state.params, state.recipe_state, sparsity, x)
        recipe_state = jax.vmap(recipe.refit)(*matrices(params), state.recipe_state)
        return dataclasses.replace(state, params=params, recipe_state=recipe_state), {}

    transitions = {"enter": enter, "refresh": refresh, "leave": leave}
    return {name: compiled(transition, config, layout) for name, transition in transitions.items()}


def transition_before(config: Config, step: int) -> str | None:
    """Names what happens to the state before `step`: "enter" or "leave" the sparse phase, "refresh", or None."""
    sparsity, before, now = config.sparsity, config.phase(step - 1), config.phase(step)
    if now != before:
        return "enter" if now == "sparse" else "leave"
    due = now == "sparse" and (step - sparsity.phase.start) % sparsity.refresh_every == 0
    return "refresh" if due and sparsity.recipe.refreshes else None


def dense_params(params: Params, recipe_state: Any, sparsity: SparsityConfig, x: Array | None = None) -> Params:
    """Returns the parameters that a run leaves the sparse phase with: FFN weights as the sparse forward uses them.

    Those of the first `sparsity.dense_layers` stay what they were. `x` are inputs [L, n, D] for recipes that read them.
    """
    effective = lax.map(lambda layer: sparsity.recipe.leave(*layer), (*matrices(params), recipe_state, x))
    whole = ffn_weights.with_dense_layers(matrices(params), effective, sparsity.dense_layers)
    return ffn_weights.with_matrices(params, *whole)


def _recorded(recipe: Recipe, stride: int) -> Recipe:
    """Makes a recipe that computes what another does, and returns every `stride`-th input in place of statistics."""

    class Recorded(type(recipe)):
        def ffn(self, x: Array, *args: Any, **kwargs: Any) -> tuple[Array, dict[str, Array]]:
            o, _ = super().ffn(x, *args, **kwargs)
            return o, {"inputs": x[::stride]}

    return Recorded(**vars(recipe))


def _ffn_inputs(
    state: TrainState, windows: Array, recipe: Recipe, *, config: Config, graphdef: Any, layout: Layout | None
) -> Array:
    """Records the inputs [L, n, D] of every layer's FFN in a forward pass by `recipe`, of n <= 2 `SAMPLE` tokens.

    Windows are left out, each device the same share of its own, as long as `SAMPLE` tokens remain, and then tokens.
    They are the same however many microbatches share the batch, and devices, where each has windows to leave out.
    """

    def record(params: Params, recipe_state: Any, windows: Array, axes: Axes = ONE_DEVICE) -> Array:
        here = windows.shape[0]
        shares = [n for n in range(1, here + 1) if here % n == 0 and config.tokens_per_step >= n * SAMPLE]
        windows = windows[:: max(shares, default=1)]
        tokens = config.tokens_per_step * windows.shape[0] // here
        recorded = _recorded(recipe, stride=max(1, tokens // SAMPLE))
        loss = functools.partial(forward_loss, config=config, graphdef=graphdef, recipe=recorded)

        def part(windows: Array) -> Array:
            return loss(params, recipe_state, windows, None, axes=axes)[1]["inputs"]

        parts = math.gcd(config.microbatches, windows.shape[0])
        by_part = lax.map(part, windows.reshape(parts, -1, windows.shape[1]))
        return by_part.swapaxes(0, 1).reshape(by_part.shape[1], -1, by_part.shape[-1])

    if layout:
        specs = layout.specs((state.params, state.recipe_state))
        record = layout.local(record, (*specs, BATCH), P(None, BATCH[0]))
    inputs = record(state.params, state.recipe_state, windows)
    return lax.with_sharding_constraint(inputs, layout.replicated) if layout else inputs
