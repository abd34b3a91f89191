"""Numbers of the GPU that a schedule must know."""

from __future__ import annotations

import jax

_H100_SXM_CORES = 132
CLUSTER = 2  # thread blocks that share an operand's tile


def core_count() -> int:
    """Counts this GPU's streaming multiprocessors; those of an H100 SXM where there is none, to lower for one."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else _H100_SXM_CORES


def cluster_count() -> int:
    """Counts the clusters that run at the same time, a thread block on each multiprocessor."""
    return core_count() // CLUSTER
