"""Refuses a backend that this machine does not have, before anything compiles."""

from __future__ import annotations

from sparse_lm.config import ConfigError
from sparse_lm.ops import backends
from sparse_lm.recipes import Recipe


def check_implementation(recipe: Recipe) -> None:
    """Raises ConfigError if `sparsity.implementation` names a backend that cannot run here."""
    name = recipe.implementation
    reason = backends.unavailable(name) if name else None
    if reason:
        raise ConfigError("sparsity.implementation", name, reason)
