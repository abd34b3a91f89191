"""Choosing the factor of FST's masked decay by flip rate (2404.01847, section 4.3).

A healthy sparse run flips 60 to 95% as many mask entries as a dense run does over the same steps:
fewer and masks are frozen before they are good, more and the weights never settle. Trial runs of a
few steps from the state at the start of the sparse phase measure that; their states are dropped.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax import Array

from sparse_lm import ops
from sparse_lm.training.step import TrainState

CANDIDATES = (6e-6, 2e-5, 6e-5, 2e-4)  # the range that the paper reports
HEALTHY = (0.60, 0.95)
TRIAL_STEPS = 40  # at most: as many as masks stay for by default

Step = Callable[[TrainState, Array], tuple[TrainState, dict[str, Array]]]

_log = logging.getLogger(__name__)


def search_mask_decay(state: TrainState, batches: Iterable[Array], sparse_step: Step, dense_step: Step) -> float:
    """The candidate whose flip rate, relative to dense training, is nearest to the middle of `HEALTHY`.

    Args:
      state: at the start of the sparse phase, masks chosen; it is copied, not donated.
      batches: the trial's, the same for every trial; at most `TRIAL_STEPS`, as all are on the devices at once.
      sparse_step: (state, windows) -> (state, metrics).
      dense_step: likewise.
    """
    batches = list(batches)
    dense = _flip_rate(state, batches, dense_step)
    ratios = {}
    for factor in CANDIDATES:
        trial = dataclasses.replace(state, mask_decay=jnp.float32(factor))
        ratios[factor] = _flip_rate(trial, batches, sparse_step) / dense if dense else 0.0
        _log.info("masked decay %g: flip rate %.2f of dense", factor, ratios[factor])
    middle = sum(HEALTHY) / 2
    best = min(ratios, key=lambda factor: abs(ratios[factor] - middle))
    if not HEALTHY[0] <= ratios[best] <= HEALTHY[1]:
        _log.warning("no masked decay in %s reaches a flip rate of %s of dense; using %g", CANDIDATES, HEALTHY, best)
    return best


def _flip_rate(state: TrainState, batches: list[Array], step: Step) -> float:
    """Share of transposable mask entries that training on `batches` flips."""
    before = _masks(state)
    state = jax.tree.map(jnp.copy, state)  # the step donates its state
    for windows in batches:
        state, _ = step(state, windows)
    after = _masks(state)
    return float(sum(jnp.mean(a ^ b) for a, b in zip(before, after, strict=True))) / len(before)


@jax.jit
def _masks(state: TrainState) -> tuple[Array, Array]:
    ffn = state.params["layers"]["ffn"]
    mask = jax.vmap(ops.transposable_mask)
    return mask(ffn["up"]), mask(ffn["down"])
