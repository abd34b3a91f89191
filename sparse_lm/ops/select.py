"""Rules that every selection in `sparse_lm.ops` follows.

Groups of four (`top_two`, and through it `sparsify_24` and the 2:4 half of `sparsify_venom`):
  order        by magnitude; +0 and -0 are equal, and NaN ranks above inf
  ties         the lower position wins, so a group of zeros keeps positions 0 and 1
  magnitude    a kept value keeps its sign, that of a zero included; inf and NaN stay what they are
  threshold    t = the second smallest magnitude in the same order; a value with |x| = t becomes +0,
               also when both are inf (three infs in one group); otherwise inf - t = inf, and a kept
               NaN stays NaN
  mvue         random, but of at most two non-zeros these; a group of zeros keeps positions 0 and 1, and
               one whose magnitudes add up to inf or NaN gives NaN there, as no estimate of it is unbiased

4 x 4 tiles (`transposable_mask`): sums of magnitudes, in which inf, NaN and everything over 2^100
count as 2^100; of equal sums the lowest pattern wins. A tile of zeros has pattern 0.

Venom columns: sums of squares, ordered as magnitudes are above; a group of zero columns keeps
columns 0 to 3.

Comparisons and selects only: sorting groups of four is slow on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

_NAN_RANK = 0x7FC00000
LARGEST = 2.0**100  # whose multiples add up without rounding, in any order

Members = Sequence[Array]  # the four members of every group: four arrays of equal shape


def split_groups(x: Array, axis: int = -1) -> list[Array]:
    """Splits a matrix into members 0, 1, 2, 3 of every group of four.

    Args:
      x: [M, K].
      axis: -1, groups run along K; 0, along M.

    Returns:
      Four arrays [M, K / 4]; [M / 4, K] for axis 0.
    """
    if axis == 0:
        groups = x.reshape(-1, 4, x.shape[1])
        return [groups[:, member] for member in range(4)]
    groups = x.reshape(x.shape[0], -1, 4)
    return [groups[..., member] for member in range(4)]


def magnitude_rank(x: Array) -> Array:
    """Returns int32 that orders as |x| does, with NaN above inf (a float's bits order as its magnitude)."""
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    return jnp.where(jnp.isnan(x), _NAN_RANK, bits)


def finite_magnitude(x: Array) -> Array:
    """Computes |x| in float32, at most 2^100, which inf and NaN become: sums of it stay finite."""
    magnitude = jnp.abs(x.astype(jnp.float32))
    return jnp.where(magnitude < LARGEST, magnitude, LARGEST)


def top_two(ranks: Members) -> tuple[Array, Array]:
    """Finds positions (first < second), uint32, of the two largest of each group; ties go to the lower position."""
    wins = {(i, j): ranks[i] >= ranks[j] for i in range(4) for j in range(i + 1, 4)}
    beats = [[wins[i, j] if i < j else ~wins[j, i] for j in range(4) if j != i] for i in range(4)]
    keep = [(a & b) | (a & c) | (b & c) for a, b, c in beats]  # wins two of its three comparisons
    first = jnp.where(keep[0], jnp.uint32(0), jnp.where(keep[1], jnp.uint32(1), jnp.uint32(2)))
    second = jnp.where(keep[3], jnp.uint32(3), jnp.where(keep[2], jnp.uint32(2), jnp.uint32(1)))
    return first, second


def take_two(members: Members, first: Array, second: Array) -> tuple[Array, Array]:
    """Takes the members of each group at positions first < second."""
    low = jnp.where(first == 0, members[0], jnp.where(first == 1, members[1], members[2]))
    high = jnp.where(second == 3, members[3], jnp.where(second == 2, members[2], members[1]))
    return low, high


def soft_threshold(members: Members) -> list[Array]:
    """Computes S(x) = sign(x) max(|x| - t, 0) with t the second smallest magnitude of the group (2409.09099).

    At most two members survive and S is continuous, so the pattern does not flip abruptly.

    Args:
      members: four float32 arrays.

    Returns:
      Four float32 arrays.
    """
    ranks = [magnitude_rank(x) for x in members]
    low, high = jnp.minimum(ranks[0], ranks[1]), jnp.maximum(ranks[0], ranks[1])
    other_low, other_high = jnp.minimum(ranks[2], ranks[3]), jnp.maximum(ranks[2], ranks[3])
    second_smallest = jnp.minimum(jnp.maximum(low, other_low), jnp.minimum(high, other_high))
    threshold = lax.bitcast_convert_type(second_smallest, jnp.float32)
    return [
        jnp.where(rank <= second_smallest, jnp.where(rank == _NAN_RANK, x, 0.0), x - jnp.copysign(threshold, x))
        for x, rank in zip(members, ranks, strict=True)
    ]


def largest(energy: Array, count: int) -> Array:
    """Finds positions of the `count` largest along the last axis, ascending.

    Args:
      energy: [..., m] float, not negative. Ties go to the lower position; NaN ranks above inf.
      count: at most m.

    Returns:
      [..., count] int32.
    """
    size = energy.shape[-1]
    rank, position = magnitude_rank(energy), jnp.arange(size)
    mine, other = rank[..., :, None], rank[..., None, :]
    beaten_by = (other > mine) | ((other == mine) & (position < position[:, None]))
    keep = jnp.sum(beaten_by, axis=-1) < count
    slot = jnp.cumsum(keep, axis=-1) - 1  # of a kept position, in ascending order
    chosen = keep[..., None, :] & (slot[..., None, :] == jnp.arange(count)[:, None])
    return jnp.sum(jnp.where(chosen, position, 0), axis=-1, dtype=jnp.int32)
