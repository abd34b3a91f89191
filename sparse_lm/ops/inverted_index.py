"""An inverted index: from the slices that each block of tokens keeps to the blocks that keep each slice."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def inverted_index(kept: Array, slices: int) -> tuple[Array, Array]:
    """Finds the blocks that keep each slice, and where in their list it stands.

    Compares slices * blocks * (2 blocks + P) numbers in a few fused kernels: meant for up to about a thousand blocks.

    Args:
      kept: int32 [blocks, P], the slices that a block keeps, distinct. Other numbers than 0 .. slices - 1 are left out.
      slices: how many there are.

    Returns:
      int32 [slices, blocks + 2]: places block * P + position, in order of the blocks, and after those the place
        blocks * P, which is none; int32 [slices], how many blocks keep each.
    """
    blocks, positions = kept.shape
    here = kept[None, :, :] == jnp.arange(slices)[:, None, None]
    position = jnp.max(jnp.where(here, jnp.arange(positions), -1), axis=2)
    is_kept = position >= 0
    block = jnp.arange(blocks)
    # With a last column for all blocks, the counts need no kernel of their own.
    before = jnp.sum(is_kept[:, None, :] & (block < jnp.arange(blocks + 1)[:, None]), axis=2, dtype=jnp.int32)
    slot = jnp.where(is_kept, before[:, :-1], -1)[:, None, :] == jnp.arange(blocks + 2)[:, None]
    places = jnp.min(jnp.where(slot, (block * positions + position)[:, None, :], blocks * positions), axis=2)
    return places.astype(jnp.int32), before[:, -1]
