"""Masks that are 2:4 along both axes: one pattern of two ones a row and a column per 4 x 4 tile."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from sparse_lm.ops.checks import check_matrix
from sparse_lm.ops.select import finite_magnitude
from sparse_lm.ops.shapes import Bool, Float


def _all_patterns() -> np.ndarray:
    rows = [np.isin(np.arange(4), kept) for kept in itertools.combinations(range(4), 2)]
    tiles = np.array(list(itertools.product(rows, repeat=4)))
    return tiles[(tiles.sum(axis=1) == 2).all(axis=1)]


TRANSPOSABLE_PATTERNS = _all_patterns()  # bool [90, 4, 4]


def transposable_mask(x: Float[Array, "F D"]) -> Bool[Array, "F D"]:
    """Finds the mask that keeps the largest sum of magnitudes, 2:4 along rows and along columns (2404.01847).

    Args:
      x: [M, N] float. Ragged edges are treated as if padded with zeros.

    Returns:
      [M, N] bool; exactly 8 of each whole 4 x 4 tile. `sparse_lm.ops.select` says what ties, inf and
      NaN give.

    Raises:
      ValueError: not a matrix, or empty.
    """
    check_matrix("x", x)
    rows, columns = x.shape
    magnitude = jnp.pad(finite_magnitude(x), ((0, -rows % 4), (0, -columns % 4)))
    tiles = magnitude.reshape(magnitude.shape[0] // 4, 4, -1, 4).transpose(0, 2, 1, 3)
    patterns = TRANSPOSABLE_PATTERNS.reshape(90, 16)
    kept = jnp.dot(tiles.reshape(*tiles.shape[:2], 16), patterns.T.astype(np.float32), precision=lax.Precision.HIGHEST)
    mask = jnp.asarray(TRANSPOSABLE_PATTERNS)[jnp.argmax(kept, axis=-1)]
    return mask.transpose(0, 2, 1, 3).reshape(magnitude.shape)[:rows, :columns]
