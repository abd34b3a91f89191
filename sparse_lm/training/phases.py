"""Dense and sparse phases of a run, and the transitions between them."""

from __future__ import annotations

from sparse_lm.config import Config
from sparse_lm.training.transitions import needs_refresh


def begins_phase(config: Config, step: int) -> bool:
    """True if `step` is trained otherwise than the step before it."""
    return config.phase(step) != config.phase(step - 1)


def transition_before(config: Config, step: int) -> str | None:
    """Names what happens to the state before `step`: "enter" or "leave" the sparse phase, "refresh", or None."""
    now, before = config.phase(step), config.phase(step - 1) if step else "dense"
    if now != before:
        return "enter" if now == "sparse" else "leave"
    return "refresh" if needs_refresh(config, step) else None
