"""Sums of rows that passes make beside what they write: by tile of 64 columns, which XLA adds up.

Numerics: float32, in the same order in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir

from sparse_lm.ops.formats import TILE
from sparse_lm.ops.hopper.frame import emit
from sparse_lm.ops.hopper.frame.emit import Number
from sparse_lm.ops.hopper.frame.thread_tile import HALVES, Tile


def sums_type(tiles: tuple[int, int]) -> jax.ShapeDtypeStruct:
    """Returns the type of the array that `store_sums` fills, of so many tiles along rows and along columns."""
    return jax.ShapeDtypeStruct((tiles[1], tiles[0] * TILE), jnp.float32)


def store_sums(sums: ir.Value, tile: Tile, totals: Sequence[Number]) -> None:
    """Stores the sum of each of a tile's rows, from the totals of a thread's part of its two rows."""
    for half, total in zip(HALVES, totals, strict=True):
        for distance in (1, 2):  # of the four threads of a row, which all store the same
            total = total + mgpu_utils.shfl_bfly(total, distance)
        row = tile.row * TILE + tile.thread.row + 8 * half
        emit.global_memory(sums).store(tile.column.wide() * emit.shape_of(sums)[1] + row.wide(), total)
