"""Types of operands and results, in global and shared memory, and padding of products."""

from __future__ import annotations

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from sparse_lm.ops.formats import TILE

_FEWEST_COLUMNS = 2 * TILE  # Mosaic's copies ignore the index into a dimension of a single tile: give it two


def swizzled(dtype: DTypeLike, line: int = 128) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Returns the transforms of a matrix in shared memory that is swizzled by lines of so many bytes."""
    return plgpu.TilingTransform((8, line // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(line)


def round_up(size: int) -> int:
    """Rounds up to whole tiles of the layout in shared memory, which TMA copies."""
    return -(-size // TILE) * TILE


def pad(x: Array, *, rows: bool = True) -> Array:
    """Pads columns and perhaps rows with zeros up to whole tiles; copies x only if it has a ragged edge."""
    return pad_to(x, (round_up(x.shape[0]) if rows else x.shape[0], round_up(x.shape[1])))


def pad_to(x: Array, shape: tuple[int, int]) -> Array:
    """Pads with zeros up to a shape; copies x unless it has that shape."""
    return x if x.shape == shape else jnp.pad(x, [(0, new - old) for old, new in zip(x.shape, shape, strict=True)])


def result_type(rows: int, columns: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """Returns the type of the array for a product [rows, columns]: whole tiles, at least two along columns."""
    return jax.ShapeDtypeStruct((round_up(rows), max(_FEWEST_COLUMNS, round_up(columns))), dtype)
