"""Steps whose loss leaps, by the mean and deviation of the losses before: `config.optimizer.spike_deviations`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

WINDOW = 128
"""Losses that a spike is told from: as many as OLMo-core's SkipStepAdamW takes, which skips over six deviations."""


def no_losses() -> Array:
    """f32[WINDOW]: what a run remembers before its first step, and at the edges of a sparse phase, where the
    loss may leap for good."""
    return jnp.full(WINDOW, jnp.nan, jnp.float32)


def is_spike(loss: Array, recent: Array, deviations: float) -> Array:
    """bool[]: whether a loss is that many standard deviations over the mean of `recent`.

    None is as long as `recent` is not full: its mean is NaN then.
    """
    return loss > jnp.mean(recent) + deviations * jnp.std(recent)


def remember(loss: Array, recent: Array) -> Array:
    """`recent` with its oldest loss replaced, if the new one is finite. Spikes count too: a loss that stays
    where it leapt to is soon no spike any more."""
    return jnp.where(jnp.isfinite(loss), jnp.roll(recent, 1).at[0].set(loss), recent)
