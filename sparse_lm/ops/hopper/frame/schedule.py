"""The clusters of a persistent grid on this GPU, and their jobs, each of some steps of one tile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

CLUSTER = 2  # thread blocks that share an operand's tile
_H100_SXM_CORES = 132


def core_count() -> int:
    """Counts this GPU's streaming multiprocessors; those of an H100 SXM where there is none, to lower for one."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else _H100_SXM_CORES


def cluster_count() -> int:
    """Counts the clusters that run at the same time, a thread block on each multiprocessor."""
    return core_count() // CLUSTER


@dataclasses.dataclass(frozen=True)
class Job:
    """Steps of one tile, by one cluster. The fields are scalars that a kernel computes."""

    row: Array  # where this block's tile starts in the product
    column: Array
    first_k: Array  # the first step along k
    steps: Array  # how many, from there on; at least one
    contributes: Array  # whether these are not the tile's first steps: the sum goes to the cluster that has those
    parts: Array  # how many other clusters contribute, if this one has the first steps


@dataclasses.dataclass(frozen=True)
class Grid:
    """The clusters of one launch, and which of them add to the tiles of others.

    The p-th contribution to a tile of cluster c, p > 0, is that of cluster c - p * contributor_stride: of one with a
    lower index, which contributes before it waits for anyone itself. That waiting ends relies on thread blocks starting
    in the order of their indices, which CUDA does not promise.
    """

    clusters: int
    odd: bool  # whether every job has an odd number of steps; else every job has an even number
    contributors: int  # clusters 0 to `contributors` - 1 may contribute, once each
    contributor_stride: int


Work = tuple[Array, Callable[[Array], Job]]
"""The jobs of a cluster: how many there are, and the i-th."""

Jobs = Callable[[Any, Array, Array], Work]
"""From the operands in global memory, the cluster, and the block in the cluster."""


def rows_in_use(lists: Array, v: int, end: int) -> Array:
    """Counts the rows up to the last block that lists anything: those after it are padding, whose products are zeros.

    Each block of v rows has a row of `lists`, where `end` or more stands for nothing. The result is int32 [1], which
    kernels read for each job anew, from the cache: consumers lack a register for it.
    """
    rows_up_to = v * jnp.arange(1, lists.shape[0] + 1, dtype=jnp.int32)[:, None]
    return jnp.max(jnp.where(lists < end, rows_up_to, 0), keepdims=True)[0]
