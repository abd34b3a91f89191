"""Numbers of the GPU that the kernels must know."""

from __future__ import annotations

import jax

_A100 = 80
_A100_CORES = 108
RAN_ON = 90
"""The one compute capability on which these kernels have run: that of an H200. For the others they were compiled."""

SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""Shared memory that a thread block can have, by each compute capability that these kernels are compiled for."""


def compute_capability() -> int:
    """Returns 80 for 8.0; that of an A100 where this process has no GPU, to compile for one."""
    device = jax.devices()[0]
    return int(device.compute_capability.replace(".", "")) if device.platform == "gpu" else _A100


def core_count() -> int:
    """Counts this GPU's streaming multiprocessors; those of an A100 where there is none."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else _A100_CORES


def shared_bytes(capability: int) -> int:
    """Returns the shared memory that a thread block can have."""
    return SHARED_KIB[capability] * 2**10
