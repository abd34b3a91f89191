"""Lets a training run take nearly all of a GPU's memory, where JAX would leave a quarter of it."""

from __future__ import annotations

import os

SHARE = "0.9"  # cuDNN, NCCL and programs themselves live in the rest
_NAMES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


def request_memory() -> None:
    """Tells JAX, through the environment, unless the user has told it. JAX must not have started yet."""
    if not any(name in os.environ for name in _NAMES):
        os.environ[_NAMES[0]] = SHARE
