"""Turns dense matrices into compressed sparse ones. `sparse_lm.ops.select` holds the rules of selection."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from sparse_lm.ops import backends
from sparse_lm.ops.checks import (
    check_array,
    check_axis,
    check_block,
    check_float,
    check_group,
    check_matrix,
    described,
    random_key,
)
from sparse_lm.ops.compress import pad_to_tiles
from sparse_lm.ops.formats import Sparse24, SparseVenom
from sparse_lm.ops.select import soft_threshold, split_groups

METHODS = ("magnitude", "mvue")


def sparsify_24(
    x: Float[Array, "rows columns"],
    method: str = "magnitude",
    axis: int = -1,
    *,
    dtype: DTypeLike | None = None,
    key: Array | None = None,
    implementation: str | None = None,
) -> Sparse24:
    """Sparsifies a matrix to 2:4: at most two of each group of four along `axis`.

    Args:
      x: [M, K] float; neither need be a multiple of 4.
      method: "magnitude" keeps the two largest; "mvue" is stochastic, without bias and of minimum variance
        (2203.10991), up to the 16 bits of its random numbers: with h at most half of a group's magnitudes, a member's
        expectation is off by less than 2^-16 h, and one below 2^-17 h may never be kept.
      axis: -1, or 0 for the compressed form of the transpose [K, M], grouped along M.
      key: PRNG key, which "mvue" needs.
    """
    check_matrix("x", x)
    check_float("dtype", dtype)
    if method not in METHODS:
        raise ValueError(f"method = {method!r} must be one of {', '.join(METHODS)}")
    check_axis(axis)
    key = random_key(key, optional=method != "mvue")
    return backends.dispatch("sparsify_24", implementation, x, method, axis, dtype=dtype or x.dtype, key=key)


def soft_threshold_24(
    w: Float[Array, "F D"],
    scale: Float[Array, " layers"],
    axis: int = -1,
    *,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> tuple[Sparse24, Array]:
    """Computes beta S(w) of a weight, compressed and dense, from one read of w (2409.09099).

    S shrinks the two largest of each four by the second smallest, and makes zeros of the others.

    Args:
      w: of one or more layers, one under the other; of one for axis 0.
      scale: f32, the beta of each F / layers rows.
      axis: -1 for groups of four along D, or 0 for both forms of the transpose [D, F], grouped along F.
    """
    check_matrix("w", w)
    check_float("dtype", dtype)
    check_array("scale", scale)
    check_float("dtype of scale", scale.dtype)
    check_axis(axis)
    if scale.ndim != 1 or scale.shape[0] == 0 or w.shape[0] % scale.shape[0]:
        raise ValueError(f"scale {list(scale.shape)} must be a list whose length divides the {w.shape[0]} rows")
    if axis == 0 and scale.shape[0] > 1:
        raise ValueError(f"scale {list(scale.shape)} must be [1] where axis = 0")
    return backends.dispatch("soft_threshold_24", implementation, w, scale, axis, dtype=dtype or w.dtype)


def sparsify_24_tiles(
    x: Float[Array, "F D"],
    mask: Bool[Array, "F D"],
    *,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> tuple[Float[Sparse24, "F D"], Float[Sparse24, "D F"]]:
    """Compresses x and its transpose under one mask that is 2:4 along both dimensions: `transposable_mask(x)`, say.

    Where a mask has more than two in a group of four, both values of the group are NaN.
    """
    check_matrix("x", x)
    check_float("dtype", dtype)
    check_array("mask", mask)
    if mask.shape != x.shape or mask.dtype != bool:
        raise ValueError(f"mask must be bool{list(x.shape)}; got {described(mask)}")
    return backends.dispatch("sparsify_24_tiles", implementation, x, mask, dtype=dtype or x.dtype)


def soft_threshold_scale(w: Float[Array, "F D"], axis: int = -1) -> Float[Array, ""]:
    """Computes the scale that brings S(w) closest to w in the least-squares sense: <w, S> / <S, S> (2409.09099).

    Groups of four run along `axis`, -1 or 0. The scale is a float32 scalar, and 1 when S(w) is zero.
    """
    check_matrix("w", w)
    check_axis(axis)
    members = split_groups(pad_to_tiles(w.astype(jnp.float32)), axis)
    thresholded = soft_threshold(members)
    overlap = sum(jnp.sum(x * s) for x, s in zip(members, thresholded, strict=True))
    energy = sum(jnp.sum(s * s) for s in thresholded)
    return jnp.where(energy == 0, 1.0, overlap / jnp.where(energy == 0, 1.0, energy))


def sparsify_venom(
    x: Float[Array, "T F"],
    v: int = 128,
    m: int = 16,
    *,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[SparseVenom, "T F"]:
    """Sparsifies a matrix to V:2:M (2310.02065): v rows share four of every m columns, each keeps two of those.

    Args:
      v: rows of a block: divides 64 or is a multiple of it.
      m: columns of a group: a multiple of 4 that divides F.
    """
    check_matrix("x", x)
    check_float("dtype", dtype)
    check_block(v)
    check_group(m, x.shape[1])
    return backends.dispatch("sparsify_venom", implementation, x, v, m, dtype=dtype or x.dtype)
