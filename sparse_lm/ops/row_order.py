"""Orders of rows: tokens in the slots where products take them, and back; the blocks of slots that keep a slice."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowOrder:
    """An order of T rows in Tp slots, some of which may be padding; some rows may have none.

    Attributes:
      slots: int32 [Tp], the row of each slot; T where padded.
      position: int32 [T], the slot of each row; Tp or more of a row that has none.
    """

    slots: Array
    position: Array


def dispatch(x: Shaped[Array, " T *rest"], rows: RowOrder | None) -> Shaped[Array, " slots *rest"]:
    """Moves rows to their slots: [T, ...] to [Tp, ...]. Padded slots are zero. Without an order rows stay.

    No gradient passes where they move.
    """
    return x if rows is None else take_rows(x, rows.slots)


def take_rows(x: Shaped[Array, " T *rest"], rows: Array, scale: Array | None = None) -> Shaped[Array, " slots *rest"]:
    """Gathers rows of x, each times its float32 scale if there are any. Rows from T on are zero.

    Of bfloat16 it gathers words of two numbers: XLA has a thread load four elements at once, whatever their size. No
    gradient passes, in any dtype.
    """
    x, scale = lax.stop_gradient((x, scale))
    in_words = x.dtype == jnp.bfloat16 and x.ndim > 1 and x.shape[-1] % 2 == 0
    taken = jnp.take(x.view(jnp.uint32) if in_words else x, rows, axis=0, mode="fill", fill_value=0)
    if scale is not None:
        scale = scale.reshape(-1, *(1,) * (x.ndim - 1))
        taken = _scaled_words(taken, scale) if in_words else (scale * taken.astype(jnp.float32)).astype(x.dtype)
    return taken.view(x.dtype)


def _scaled_words(words: Array, scale: Array) -> Array:
    """Scales the two bfloat16 numbers of each word, the first of which is the lower half."""
    halves = (lax.bitcast_convert_type(half, jnp.float32) for half in (words << 16, words >> 16 << 16))
    low, high = ((scale * half).astype(jnp.bfloat16).view(jnp.uint16).astype(jnp.uint32) for half in halves)
    return high << 16 | low


def combine(y: Shaped[Array, " slots *rest"], rows: RowOrder | None) -> Shaped[Array, " T *rest"]:
    """Moves rows back from their slots, [Tp, ...] to [T, ...]. What rows without a slot get is not defined."""
    return y if rows is None else y[rows.position]


def in_rows(x: Shaped[Array, "M N"]) -> Shaped[Array, "M N"]:
    """Stores what was gathered once, row after row.

    XLA would lay it out as one of its consumers likes best, gathering single numbers in place of rows, or gather it
    anew in each of them.
    """
    return lax.optimization_barrier(with_layout_constraint(jnp.asarray(x), Layout(major_to_minor=(0, 1))))


def inverted_index(kept: Array, slices: int) -> tuple[Array, Array]:
    """Finds the blocks that keep each slice, and where in their list it stands.

    `kept` int32 [blocks, P] lists the slices that a block keeps, distinct. Other numbers than 0 .. slices - 1 are left
    out. It compares slices * blocks * (2 blocks + P) numbers in a few fused kernels: for up to about a thousand blocks.

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
