"""The inverted index of lists of neurons: which blocks of tokens list each run of neurons."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def listed_at(lists: Array, runs: int) -> tuple[Array, Array]:
    """Which blocks list each run, and where.

    Compares runs * blocks * (2 blocks + P) numbers in a few fused kernels: meant for up to about a thousand blocks.

    Args:
      lists: int32 [blocks, P], the runs that a block lists, distinct.
      runs: how many there are.

    Returns:
      int32 [runs, blocks + 2]: places block * P + position, in order of the blocks, and after those the place
        blocks * P, which is none; int32 [runs], how many blocks list a run.
    """
    blocks, listings = lists.shape
    here = lists[None, :, :] == jnp.arange(runs)[:, None, None]
    position = jnp.max(jnp.where(here, jnp.arange(listings), -1), axis=2)
    listed = position >= 0
    block = jnp.arange(blocks)
    # With a last column for all blocks, the counts need no kernel of their own.
    before = jnp.sum(listed[:, None, :] & (block < jnp.arange(blocks + 1)[:, None]), axis=2, dtype=jnp.int32)
    slot = jnp.where(listed, before[:, :-1], -1)[:, None, :] == jnp.arange(blocks + 2)[:, None]
    places = jnp.min(jnp.where(slot, (block * listings + position)[:, None, :], blocks * listings), axis=2)
    return places.astype(jnp.int32), before[:, -1]
