"""Refusals that several ops share. Each raises ValueError and names what it refuses, and what is allowed."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from sparse_lm.ops.columns import CHOICES
from sparse_lm.ops.formats import TILE


def check_matrix(name: str, x: Array) -> None:
    """A matrix of floats that is not empty."""
    if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.floating) or x.size == 0:
        stack = "; use vmap for a stack of them" if x.ndim > 2 else ""
        raise ValueError(f"{name} must be a matrix of floats, not empty; got {x.dtype}{list(x.shape)}{stack}")


def check_axis(axis: int) -> None:
    """A dimension that groups of four run along."""
    if axis not in (-1, 0):
        raise ValueError(f"axis = {axis} must be -1 or 0")


def check_block(v: int) -> None:
    """A number of rows that whole 64-row tiles hold."""
    if v < 1 or (TILE % v and v % TILE):
        raise ValueError(f"v = {v} must divide {TILE} or be a multiple of it")


def check_column_choice(columns: str) -> None:
    """A way to choose four columns of m."""
    if columns not in CHOICES:
        raise ValueError(f"columns = {columns!r} must be one of {', '.join(CHOICES)}")
