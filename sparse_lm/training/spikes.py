"""Tells a step whose loss jumps by the mean and deviation of the losses before it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

WINDOW = 128
"""Losses that a spike is told from: as many as OLMo-core's SkipStepAdamW takes, which skips over six deviations."""


def no_losses() -> Array:
    """Returns f32[WINDOW] of NaN: what a run remembers before its first step and after a phase transition."""
    return jnp.full(WINDOW, jnp.nan, jnp.float32)


def is_spike(loss: Array, recent: Array, deviations: float) -> Array:
    """Returns bool[]: true if a loss is that many standard deviations over the mean of `recent`.

    No loss is before `recent` is full, since its mean is NaN until then.
    """
    return loss > jnp.mean(recent) + deviations * jnp.std(recent)


def remember(loss: Array, recent: Array) -> Array:
    """Replaces the oldest loss, if the new one is finite. Spikes count too: a loss that stays high is soon none."""
    return jnp.where(jnp.isfinite(loss), jnp.roll(recent, 1).at[0].set(loss), recent)
