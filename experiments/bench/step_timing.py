"""Times of training steps, dispatched one ahead, as in training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def time_steps(
    step: Callable[[Any, Any], tuple[Any, dict[str, Any]]],
    state: Any,
    batches: Sequence[Any],
    *,
    warmup: int,
    timed: int,
) -> tuple[Any, list[float]]:
    """Returns the state after `warmup + timed + 2` steps, and the seconds of the timed ones.

    A step's time is that between the arrivals of its results and of those of the step before, both after the
    next step was dispatched. The last step has none behind it and is not timed: where a dispatch waits for the
    devices, most of it would be over before its predecessor's arrival is seen.

    Raises:
      RuntimeError: if the last loss is not finite.
    """
    arrivals, pending = [], None
    for number in range(warmup + timed + 2):
        state, metrics = step(state, batches[number % len(batches)])
        if pending is not None:
            jax.block_until_ready(pending)
            arrivals.append(time.perf_counter())
        pending = metrics
    loss = float(pending["loss"])
    if not np.isfinite(loss):
        raise RuntimeError(f"the loss is {loss}")
    return state, np.diff(arrivals)[warmup:].tolist()


def step_times(seconds: Sequence[float]) -> dict[str, Any]:
    """Summarises the times of steps: median and quartiles in milliseconds, and how many were timed."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return dict(step_ms=1e3 * median, step_ms_quartiles=(1e3 * low, 1e3 * high), timed_steps=len(seconds))
