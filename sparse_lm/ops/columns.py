"""Choice of the 4 of every M columns that the V rows of a Venom block share (2310.02065): those of largest norm."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from sparse_lm.ops.checks import check_group, check_matrix
from sparse_lm.ops.select import largest
from sparse_lm.ops.shapes import Float, Int32


def venom_columns(x: Float[Array, "T F"], v: int, m: int) -> Int32[Array, "blocks S"]:
    """Chooses the four columns of largest L2 norm, over a block's rows, of each group of m.

    Args:
      x: [M, K] float; a last, ragged block counts as padded with zeros.
      v: rows of a block.
      m: columns of a group; divides K.

    Returns:
      int32 [ceil(M / v), 4 K / m]: absolute columns, ascending.

    Raises:
      ValueError: not a matrix, empty, or m is no multiple of 4 that divides K.
    """
    check_matrix("x", x)
    rows, width = x.shape
    check_group(m, width)
    blocks = jnp.pad(x, ((0, -rows % v), (0, 0))).reshape(-1, v, width // m, m)
    members = largest(jnp.sum(jnp.square(blocks.astype(jnp.float32)), axis=1), 4)
    first_of_group = m * jnp.arange(width // m, dtype=jnp.int32)[:, None]
    return (members + first_of_group).reshape(members.shape[0], -1)
