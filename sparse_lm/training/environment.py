"""Asks JAX for what training needs, mostly before it starts, and refuses what this machine does not have."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from sparse_lm.errors import ConfigError
from sparse_lm.ops import backends, fp8
from sparse_lm.recipes import Recipe

_MEMORY = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_MEMORY_SHARE = "0.9"  # cuDNN, NCCL and programs themselves live in the rest


def request_memory() -> None:
    """Tells JAX, through the environment, to take nearly all of a GPU's memory, unless the user has told it.

    It would leave a quarter. JAX must not have started yet: importing it is not starting it.
    """
    if not any(name in os.environ for name in _MEMORY):
        os.environ[_MEMORY[0]] = _MEMORY_SHARE


def keep_programs(workdir: str) -> None:
    """Tells JAX to keep in the workdir what it compiles for a GPU, unless the user has named a directory.

    A run that goes on there loads its programs in seconds, and has the kernels that were chosen by timing them. A
    program for one kind of CPU may not run on another.
    """
    if jax.default_backend() == "gpu" and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(Path(workdir, "programs").absolute()))


def check_implementation(recipe: Recipe) -> None:
    """Raises ConfigError if `sparsity.implementation` names a backend that cannot run here."""
    name = recipe.implementation
    if reason := name and backends.unavailable(name):
        raise ConfigError("sparsity.implementation", name, reason)


def check_precision(precision: str) -> None:
    """Raises ConfigError if `model.precision` is FP8 on a GPU that has none. A CPU emulates it."""
    if reason := precision == fp8.PRECISION and fp8.unavailable():
        raise ConfigError("model.precision", precision, f"{reason}; allowed here: bf16")
