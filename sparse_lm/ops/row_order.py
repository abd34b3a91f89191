"""Orders of rows: tokens in the slots where products take them, and back."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from sparse_lm.ops.shapes import Shaped


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


def dispatch(x: Shaped[Array, " T *rest"], rows: RowOrder) -> Shaped[Array, " slots *rest"]:
    """Moves rows to their slots: [T, ...] to [Tp, ...]. Padded slots are zero."""
    return jnp.take(x, rows.slots, axis=0, mode="fill", fill_value=0)


def combine(y: Shaped[Array, " slots *rest"], rows: RowOrder) -> Shaped[Array, " T *rest"]:
    """Moves rows back from their slots: [Tp, ...] to [T, ...]. Not defined for rows that have none."""
    return y[rows.position]
