"""The squared ReLU of what `sampled_matmul_24` gives, and its selection, one kernel after the other."""

from __future__ import annotations

from jax import Array

from sparse_lm.ops.formats import HiddenStats, Sparse24
from sparse_lm.ops.triton.passes.sparsify_24 import squared_relu_24
from sparse_lm.ops.triton.products.sampled_matmul_24 import sampled_matmul_24


def sampled_squared_relu_24(
    w: Sparse24, x: Array, neuron_ids: Array, v: int, *, contiguous: int = 1
) -> tuple[Sparse24, HiddenStats]:
    """See `sparse_lm.ops.sampled_squared_relu_24`.

    Raises:
      NotImplementedError: the dtypes, or v.
    """
    return squared_relu_24(sampled_matmul_24(w, x, neuron_ids, v, contiguous=contiguous))
