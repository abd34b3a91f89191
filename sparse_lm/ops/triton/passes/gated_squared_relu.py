"""Computes the 2:4 form of Y = relu(G)^2 U, and its gradients: XLA's around the kernels of sparsify_24."""

from __future__ import annotations

from jax import Array

from sparse_lm.ops import reference
from sparse_lm.ops.checks import check_hidden_dtype
from sparse_lm.ops.formats import HiddenGradients, HiddenStats, Sparse24
from sparse_lm.ops.triton.passes.sparsify_24 import sparsify_24


def gated_squared_relu_24(h: Array) -> tuple[Sparse24, HiddenStats]:
    """See `sparse_lm.ops.gated_squared_relu_24`; refuses an h that is not of 16-bit floats."""
    check_hidden_dtype(h.dtype)
    return reference.gated_squared_relu_24(h, sparsify=sparsify_24)


def gated_squared_relu_gradients(dy: Array, h: Array, y: Sparse24, *, key: Array) -> HiddenGradients:
    """See `sparse_lm.ops.gated_squared_relu_gradients`; refuses a dy that is not of 16-bit floats, and keys of another
    generator than JAX's default one."""
    check_hidden_dtype(dy.dtype)
    return reference.gated_squared_relu_gradients(dy, h, y, key=key, sparsify=sparsify_24)
