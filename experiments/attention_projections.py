"""One attention projection's three products, [T, D] tokens and a [D, D] weight: dense, and with a 2:4 forward.

    Y = X W^T    dX = dY W    dW = dY^T X

A weight that is 2:4 along its inputs serves the forward. dX contracts its outputs, along which it is not 2:4, and
dW has no weight among its operands: both stay dense.
"""

from __future__ import annotations

from jax import Array

from sparse_lm import ops

Products = tuple[Array, Array, Array]
"""Y [T, D], dX [T, D], dW [D, D]."""

# What was measured of products and passes before (results/matmul_h200.json, results/sparsify_h200.json).
DENSE_RATE = 790e12  # FLOP/s
SPEEDUP_24 = 1.54  # of `matmul_24` over the dense product
BANDWIDTH = 3.3e12  # bytes/s of passes that read and write


def dense_products(x: Array, dy: Array, w: Array) -> Products:
    """As a dense step computes them, of a float32 weight."""
    w = w.astype(x.dtype)
    return x @ w.T, dy @ w, dy.T @ x


def products_24(x: Array, dy: Array, w: Array, scale: Array) -> Products:
    """With scale S(w), S the 2:4 soft threshold along the inputs, for w: compressed in Y, dense in dX."""
    sparse, masked = ops.soft_threshold_24(w, scale[None], dtype=x.dtype)
    return ops.matmul_24(sparse, x, b_transposed=True, out_transposed=True), dy @ masked, dy.T @ x


def predicted_ms(tokens: int, dim: int) -> dict[str, float]:
    """Milliseconds of the two functions above, from FLOPs and bytes."""
    product = 2 * tokens * dim**2 / DENSE_RATE
    cast = (4 + 2) * dim**2 / BANDWIDTH  # float32 to bfloat16
    compress = (4 + 9 / 8 + 2) * dim**2 / BANDWIDTH  # float32 to values, metadata and the masked weight
    return dict(dense=1e3 * (3 * product + cast), sparse=1e3 * (product / SPEEDUP_24 + 2 * product + compress))


def saved_share(sparse_over_dense: float, step: dict) -> float:
    """Of a step's time: what its attention projections would save.

    Args:
      sparse_over_dense: time of the products with a 2:4 forward, relative to the dense ones.
      step: one recipe's results of `bench_step`, with its profile.
    """
    return (1 - sparse_over_dense) * step["ms_by_part"]["attention projections"]["total"] / step["step_ms"]
