"""Refusals that several ops or backends share. Each names what it refuses, and what is allowed.

A wrong format is a TypeError; wrong dtypes, shapes and numbers are a ValueError. What the instructions of sparse tensor
cores, and so kernels, do not take, is a NotImplementedError: another backend may.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from sparse_lm.ops.formats import TILE, Sparse24, SparseVenom


def described(x: Any) -> str:
    """Returns dtype and shape of an array, as in float32[2, 3], or else the name of a type."""
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, Array | np.ndarray) else type(x).__name__


def check_array(name: str, x: Any) -> None:
    if not isinstance(x, Array | np.ndarray):
        raise TypeError(f"{name} must be an array; got {described(x)}")


def check_matrix(name: str, x: Array) -> None:
    check_array(name, x)
    if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.floating) or x.size == 0:
        stack = "; use vmap for a stack of them" if x.ndim > 2 else ""
        raise ValueError(f"{name} must be a matrix of floats, not empty; got {described(x)}{stack}")


def check_format(name: str, x: Any, *formats: type[Sparse24] | type[SparseVenom]) -> None:
    if not isinstance(x, formats):
        allowed = " or ".join(format.__name__ for format in formats)
        raise TypeError(f"{name} must be a {allowed}; got {described(x)}")


def check_ids(name: str, ids: Array) -> None:
    check_array(name, ids)
    if ids.ndim != 2 or ids.dtype != jnp.int32 or ids.size == 0:
        raise ValueError(f"{name} must be a matrix of int32, not empty; got {described(ids)}")


def random_key(key: Any, *, optional: bool = True) -> Array | None:
    """Returns a key as `jax.random.key` makes it, of `PRNGKey`'s, too; None of None if `optional`. Refuses others."""
    if isinstance(key, Array | np.ndarray) and key.dtype == jnp.uint32 and key.ndim == 1:
        return jax.random.wrap_key_data(jnp.asarray(key))
    is_key = isinstance(key, Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0
    if not (is_key or (optional and key is None)):
        raise ValueError(f"key must be one random key, such as jax.random.key(0); got {described(key)}")
    return key


def check_order(order: Array | None, tokens: int) -> None:
    if order is None:
        return
    check_array("order", order)
    if (order.shape, order.dtype.kind) != ((tokens,), "i"):
        raise ValueError(f"order {described(order)} must be int[{tokens}], a permutation of the tokens")


def check_float(name: str, dtype: DTypeLike | None) -> None:
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name} = {jnp.dtype(dtype)} must be a dtype of floats")


def check_contraction(left: str, left_shape: tuple[int, ...], right: str, right_shape: tuple[int, ...]) -> None:
    if left_shape[1] != right_shape[0]:
        raise ValueError(f"{left} {list(left_shape)} and {right} {list(right_shape)} cannot be multiplied")
    if 0 in (*left_shape, *right_shape):
        raise ValueError(f"{left} {list(left_shape)} and {right} {list(right_shape)} must not be empty")


def check_axis(axis: int) -> None:
    if axis not in (-1, 0):
        raise ValueError(f"axis = {axis} must be -1 or 0")


def check_group(m: int, columns: int) -> None:
    if m < 4 or m % 4 or columns % m:
        raise ValueError(f"m = {m} must be a multiple of 4 that divides the {columns} columns")


def check_block(v: int) -> None:
    if v < 1 or (TILE % v and v % TILE):
        raise ValueError(f"v = {v} must divide {TILE} or be a multiple of it")


def product_dtype(a: Any, b: Array, out_dtype: DTypeLike | None) -> jnp.dtype:
    """Returns the dtype of a @ b, by default b's. Raises NotImplementedError for dtypes that no kernel multiplies."""
    out_dtype = jnp.dtype(out_dtype or b.dtype)
    if a.dtype not in (jnp.bfloat16, jnp.float16) or b.dtype != a.dtype:
        raise NotImplementedError(f"needs both operands in bfloat16 or in float16, not {a.dtype} and {b.dtype}")
    if out_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(f"gives bfloat16, float16 or float32, not {out_dtype}")
    return out_dtype


def check_selection_dtypes(x: jnp.dtype, out: DTypeLike) -> None:
    """Raises NotImplementedError for dtypes of a matrix and of its values that no kernel's selection has."""
    out = jnp.dtype(out)
    if x not in (jnp.float32, jnp.bfloat16, jnp.float16) or out not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"takes float32 or 16-bit floats and gives 16-bit floats, not {x} to {out}")


def check_multiples(sizes: dict[str, tuple[int, int]]) -> None:
    """Raises NotImplementedError for a size, by name, that is no multiple of the number beside it, as kernels need."""
    for name, (size, unit) in sizes.items():
        if size % unit:
            raise NotImplementedError(f"{name} = {size} must be a multiple of {unit}")


def check_hidden_dtype(*dtypes: jnp.dtype) -> None:
    """Raises NotImplementedError for arrays of a hidden layer that are not of 16-bit floats, all of one dtype."""
    if dtypes[0] not in (jnp.bfloat16, jnp.float16) or len(set(dtypes)) > 1:
        raise NotImplementedError(f"takes bfloat16 or float16 throughout, not {' and '.join(map(str, dtypes))}")
