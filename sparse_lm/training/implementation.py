"""Refuses a backend or a precision that this machine does not have, before anything compiles."""

from __future__ import annotations

from sparse_lm.config import ConfigError
from sparse_lm.ops import backends, fp8
from sparse_lm.recipes import Recipe


def check_implementation(recipe: Recipe) -> None:
    """Raises ConfigError if `sparsity.implementation` names a backend that cannot run here."""
    name = recipe.implementation
    reason = backends.unavailable(name) if name else None
    if reason:
        raise ConfigError("sparsity.implementation", name, reason)


def check_precision(precision: str) -> None:
    """Raises ConfigError if `model.precision` is FP8 on a GPU that has none. A CPU emulates it."""
    reason = fp8.unavailable() if precision == fp8.PRECISION else None
    if reason:
        raise ConfigError("model.precision", precision, f"{reason}; allowed here: bf16")
