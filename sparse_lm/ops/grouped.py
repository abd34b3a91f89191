"""Products of experts whose weights are dense: each block of tokens with its expert's slice of the neurons.

E experts of S neurons each have rows e * S .. (e + 1) * S of the weights [E * S, D]. Blocks of v tokens follow one
another in the order of their experts, so that an expert's tokens are contiguous.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from sparse_lm.ops import backends
from sparse_lm.ops.checks import check_array, check_contraction, check_float, check_matrix, described


def grouped_up(
    x: Float[Array, "T D"],
    w: Float[Array, "F D"],
    block_experts: Int32[Array, " blocks"],
    v: int,
    experts: int,
    *,
    padded: bool = False,
    implementation: str | None = None,
) -> Float[Array, "T S"]:
    """Computes x @ w[slice]^T in the dtype of x, each block with its expert's slice.

    Args:
      x: blocks of v tokens.
      w: a neuron a row; expert e has rows e * F / E and on.
      block_experts: [T / v], the expert of each block, ascending.
      experts: E, which divides F.
      padded: the last blocks may be padding, tokens of zeros whose expert is E. Kernels then skip these.
    """
    _check_weights(w, experts)
    _check_tokens("x", x, block_experts, v)
    check_contraction("x", x.shape, "w[slice]^T", (w.shape[1], w.shape[0] // experts))
    return backends.dispatch("grouped_up", implementation, x, w, block_experts, v, experts, padded=padded)


def grouped_down(
    y: Float[Array, "T S"],
    w: Float[Array, "F D"],
    block_experts: Int32[Array, " blocks"],
    v: int,
    experts: int,
    *,
    padded: bool = False,
    implementation: str | None = None,
) -> Float[Array, "T D"]:
    """Computes y @ w[slice], each block with its expert's slice; arguments as in `grouped_up`."""
    _check_weights(w, experts)
    _check_tokens("y", y, block_experts, v)
    check_contraction("y", y.shape, "w[slice]", (w.shape[0] // experts, w.shape[1]))
    return backends.dispatch("grouped_down", implementation, y, w, block_experts, v, experts, padded=padded)


def grouped_weights(
    y: Float[Array, "T S"],
    x: Float[Array, "_ D"],
    block_experts: Int32[Array, " blocks"],
    v: int,
    experts: int,
    *,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "F D"]:
    """Computes y_e^T @ x_e of the tokens of each expert e, the gradient of its slice of the weights.

    Arguments are as in `grouped_up`; in `block_experts`, E stands for no expert. The result [E * S, D] has `out_dtype`,
    that of x by default, and zeros for an expert that has no block.
    """
    check_matrix("y", y)
    _check_tokens("x", x, block_experts, v)
    check_contraction("y^T", y.shape[::-1], "x", x.shape)
    if experts < 1:
        raise ValueError(f"experts = {experts} must be positive")
    check_float("out_dtype", out_dtype)
    return backends.dispatch(
        "grouped_weights", implementation, y, x, block_experts, v, experts, out_dtype=jnp.dtype(out_dtype or x.dtype)
    )


def group_sizes(block_experts: Int32[Array, " blocks"], v: int, experts: int) -> Int32[Array, " E"]:
    """Counts the tokens of each expert, whole blocks: int32 [E]."""
    return v * jnp.sum(block_experts[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)


def _check_tokens(name: str, x: Array, block_experts: Array, v: int) -> None:
    check_matrix(name, x)
    check_array("block_experts", block_experts)
    if v < 1 or block_experts.dtype != jnp.int32 or block_experts.shape != (x.shape[0] // v,) or x.shape[0] % v:
        raise ValueError(
            f"block_experts must be int32 [{x.shape[0]} / {v}], one for each whole block of v tokens; "
            f"got {described(block_experts)}"
        )


def _check_weights(w: Array, experts: int) -> None:
    check_matrix("w", w)
    if experts < 1 or w.shape[0] % experts:
        raise ValueError(f"experts = {experts} must divide the {w.shape[0]} rows of w")
