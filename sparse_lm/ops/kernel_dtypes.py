"""Dtypes that the sparse tensor cores' instructions take, and so the kernels of every backend."""

from __future__ import annotations

import jax.numpy as jnp


def check_product_dtypes(w: jnp.dtype, b: jnp.dtype, out: jnp.dtype) -> None:
    """Raises NotImplementedError for dtypes of w, b and the result that no kernel's product has."""
    if w not in (jnp.bfloat16, jnp.float16) or b != w:
        raise NotImplementedError(f"needs both operands in bfloat16 or in float16, not {w} and {b}")
    if out not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(f"gives bfloat16, float16 or float32, not {out}")


def check_selection_dtypes(x: jnp.dtype, out: jnp.dtype) -> None:
    """Raises NotImplementedError for dtypes of a matrix and of its values that no kernel's selection has."""
    if x not in (jnp.float32, jnp.bfloat16, jnp.float16) or out not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"takes float32 or 16-bit floats and gives 16-bit floats, not {x} to {out}")


def check_hidden_dtype(dtype: jnp.dtype) -> None:
    """Raises NotImplementedError for a hidden layer that is not of 16-bit floats."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"takes bfloat16 or float16, not {dtype}")
