"""Which 4 of every M columns the V rows of a Venom block share (2310.02065)."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
from jax import Array, lax

from sparse_lm.ops.select import finite_magnitude, largest
from sparse_lm.ops.shapes import Float, Int32

CHOICES = ("norm", "exhaustive")


def venom_columns(x: Float[Array, "T F"], v: int, m: int, choice: str = "norm") -> Int32[Array, "blocks S"]:
    """The four columns of each group of m that each block of v rows keeps.

    Args:
      x: [M, K] float; a last, ragged block counts as padded with zeros.
      v: rows of a block.
      m: columns of a group; divides K.
      choice: "norm", the four of largest L2 norm over the block's rows, or "exhaustive", of all
        C(m, 4) combinations the one with the largest sum, over the rows, of a row's two largest
        magnitudes: what 2:4 will keep. Its time grows with C(m, 4), its memory does not.

    Returns:
      int32 [ceil(M / v), 4 K / m]: absolute columns, ascending.

    Raises:
      ValueError: m is no multiple of 4 that divides K, or an unknown choice.
    """
    rows, width = x.shape
    if m < 4 or m % 4 or width % m:
        raise ValueError(f"m = {m} must be a multiple of 4 that divides the {width} columns")
    blocks = jnp.pad(x, ((0, -rows % v), (0, 0))).reshape(-1, v, width // m, m)
    match choice:
        case "norm":
            members = largest(jnp.sum(jnp.square(blocks.astype(jnp.float32)), axis=1), 4)
        case "exhaustive":
            members = _best_combination(blocks)
        case _:
            raise ValueError(f"choice = {choice!r} must be one of {', '.join(CHOICES)}")
    return absolute_columns(members, m)


def absolute_columns(members: Array, m: int) -> Array:
    """Members [B, G, 4] of groups of m columns to columns [B, 4 G]."""
    start = m * jnp.arange(members.shape[1], dtype=jnp.int32)
    return (members + start[:, None]).reshape(members.shape[0], -1)


def _best_combination(blocks: Array) -> Array:
    """[B, v, G, m] to the members, [B, G, 4] int32, of the best combination of each group."""
    magnitude = finite_magnitude(blocks).transpose(3, 0, 1, 2)
    combinations = jnp.array(list(itertools.combinations(range(blocks.shape[-1]), 4)), jnp.int32)

    def compare(best: tuple[Array, Array], combination: Array):
        a, b, c, d = (magnitude[combination[i]] for i in range(4))
        two_largest = jnp.maximum(jnp.maximum(a, b) + jnp.maximum(c, d), jnp.maximum(a + b, c + d))
        energy = jnp.sum(two_largest, axis=1)
        most, members = best
        better = energy > most
        return (jnp.where(better, energy, most), jnp.where(better[..., None], combination, members)), None

    groups = (blocks.shape[0], blocks.shape[2])
    start = jnp.full(groups, -1.0), jnp.zeros((*groups, 4), jnp.int32)
    (_, members), _ = lax.scan(compare, start, combinations)
    return members
