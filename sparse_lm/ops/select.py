"""Rules that every selection in `sparse_lm.ops` follows.

Groups of four (`top_two`, and through it `sparsify_24` and the 2:4 half of `sparsify_venom`):
  order        by magnitude; +0 and -0 are equal, and NaN ranks above inf
  ties         the lower position wins, so a group of zeros keeps positions 0 and 1
  magnitude    a kept value keeps its sign, that of a zero included; inf and NaN stay what they are
  threshold    t = the second smallest magnitude in the same order; a value with |x| = t becomes +0, also when both
               are inf (three infs in one group); otherwise inf - t = inf, and a kept NaN stays NaN
  mvue         random, but of at most two finite non-zeros these; a group of zeros keeps positions 0 and 1, one
               infinite member stays, of several, or sums that are inf, two members become inf, not always these, and
               a member that is NaN makes NaN of the group

4 x 4 tiles (`transposable_mask`): sums of magnitudes, in which inf, NaN and everything over 2^100
count as 2^100; of equal sums the lowest pattern wins. A tile of zeros has pattern 0.

Venom columns: sums of squares, ordered as magnitudes are above; a group of zero columns keeps columns 0 to 3.

Comparisons and selects only: sorting groups of four is slow on every device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from sparse_lm.ops.checks import check_group, check_matrix

_NAN_RANK = 0x7FC00000
LARGEST = 2.0**100  # whose multiples add up without rounding, in any order

Members = Sequence[Array]  # the four members of every group: four arrays of equal shape


def split_groups(x: Array, axis: int = -1) -> Members:
    """Splits a matrix [M, K] into members 0, 1, 2, 3 of every group of four along K, [M, K / 4] each.

    For axis 0 groups run along M, and members are [M / 4, K].
    """
    if axis == 0:
        return jnp.unstack(x.reshape(-1, 4, x.shape[1]), axis=1)
    return jnp.unstack(x.reshape(x.shape[0], -1, 4), axis=2)


def magnitude_rank(x: Array) -> Array:
    """Returns int32 that orders as |x| does, with NaN above inf (a float's bits order as its magnitude)."""
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    return jnp.where(jnp.isnan(x), _NAN_RANK, bits)


def top_two(members: Members) -> tuple[Array, Array]:
    """Finds positions (first < second), uint32, of the two largest of each group; ties go to the lower position."""
    ranks = [magnitude_rank(member) for member in members]
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

    At most two members survive and S is continuous, so the pattern does not flip abruptly. Members are float32.
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


def _four_largest(energy: Array) -> Array:
    """Finds positions int32 [..., 4], ascending, of the four largest of [..., m], none negative; of ties the lower."""
    rank, position = magnitude_rank(energy), jnp.arange(energy.shape[-1])
    mine, other = rank[..., :, None], rank[..., None, :]
    beaten_by = (other > mine) | ((other == mine) & (position < position[:, None]))
    keep = jnp.sum(beaten_by, axis=-1) < 4
    slot = jnp.cumsum(keep, axis=-1) - 1  # of a kept position, in ascending order
    chosen = keep[..., None, :] & (slot[..., None, :] == jnp.arange(4)[:, None])
    return jnp.sum(jnp.where(chosen, position, 0), axis=-1, dtype=jnp.int32)


def venom_columns(x: Float[Array, "T F"], v: int, m: int) -> Int32[Array, "blocks S"]:
    """Chooses the four columns of largest L2 norm, over a block's v rows, of each group of m (2310.02065).

    m is a multiple of 4 that divides K. A last, ragged block of x [M, K] counts as padded with zeros.

    Returns:
      int32 [ceil(M / v), 4 K / m]: absolute columns, ascending.
    """
    check_matrix("x", x)
    rows, width = x.shape
    check_group(m, width)
    if v < 1:
        raise ValueError(f"v = {v} must be positive")
    blocks = jnp.pad(x, ((0, -rows % v), (0, 0))).reshape(-1, v, width // m, m)
    members = _four_largest(jnp.sum(jnp.square(blocks.astype(jnp.float32)), axis=1))
    first_of_group = m * jnp.arange(width // m, dtype=jnp.int32)[:, None]
    return (members + first_of_group).reshape(members.shape[0], -1)


def _all_patterns() -> np.ndarray:
    rows = [np.isin(np.arange(4), kept) for kept in itertools.combinations(range(4), 2)]
    tiles = np.array(list(itertools.product(rows, repeat=4)))
    return tiles[(tiles.sum(axis=1) == 2).all(axis=1)]


TRANSPOSABLE_PATTERNS = _all_patterns()  # bool [90, 4, 4]


def transposable_mask(x: Float[Array, "F D"]) -> Bool[Array, "F D"]:
    """Finds the mask that keeps the largest sum of magnitudes, 2:4 along rows and along columns (2404.01847).

    It keeps exactly 8 of each whole 4 x 4 tile; ragged edges count as padded with zeros. The docstring of
    `sparse_lm.ops.select` says what ties, inf and NaN give.
    """
    check_matrix("x", x)
    rows, columns = x.shape
    magnitude = jnp.abs(x.astype(jnp.float32))
    magnitude = jnp.where(magnitude < LARGEST, magnitude, LARGEST)  # also of inf and NaN, so that sums stay finite
    magnitude = jnp.pad(magnitude, ((0, -rows % 4), (0, -columns % 4)))
    tiles = magnitude.reshape(magnitude.shape[0] // 4, 4, -1, 4).transpose(0, 2, 1, 3)
    patterns = TRANSPOSABLE_PATTERNS.reshape(90, 16)
    kept = jnp.dot(tiles.reshape(*tiles.shape[:2], 16), patterns.T.astype(np.float32), precision=lax.Precision.HIGHEST)
    mask = jnp.asarray(TRANSPOSABLE_PATTERNS)[jnp.argmax(kept, axis=-1)]
    return mask.transpose(0, 2, 1, 3).reshape(magnitude.shape)[:rows, :columns]
