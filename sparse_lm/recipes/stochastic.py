"""Weight gradients of a dense hidden layer with one operand made 2:4 along tokens at random (MVUE, 2203.10991).

The draw has no bias and least variance, so that the gradient is right in the mean. `fst` and `sste` share it.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from sparse_lm import ops
from sparse_lm.recipes.base import FfnCall


@jax.named_call
def grad_up_from_dh(dh: Array, x: Array, ffn: FfnCall) -> Array:
    """Computes dW1 = dH^T X [F, D] with dH^T 2:4 along tokens."""
    dh_t = ops.sparsify_24(dh, "mvue", 0, key=ffn.subkey(1), implementation=ffn.implementation)
    return ops.matmul_24(dh_t, x, out_dtype=ffn.gradient_dtype, implementation=ffn.implementation)


@jax.named_call
def grad_down_from_do(y: Array, do: Array, ffn: FfnCall) -> Array:
    """Computes dW2 = Y^T dO [F, D] as (dO^T Y)^T, since the sparse operand, dO^T 2:4 along tokens, comes first."""
    do_t = ops.sparsify_24(do, "mvue", 0, key=ffn.subkey(2), implementation=ffn.implementation)
    options: dict[str, Any] = dict(out_dtype=ffn.gradient_dtype, implementation=ffn.implementation)
    return ops.matmul_24(do_t, y, out_transposed=True, **options)
