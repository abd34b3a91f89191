"""`squared_relu_venom` of what `sampled_matmul_24` gives, one kernel after the other."""

from __future__ import annotations

from jax import Array

from sparse_lm.ops.formats import HiddenStats, Sparse24, SparseVenom
from sparse_lm.ops.triton.sampled_matmul_24 import sampled_matmul_24
from sparse_lm.ops.triton.sparsify_venom import squared_relu_venom


def sampled_squared_relu_venom(
    w: Sparse24, x: Array, neuron_ids: Array, block: int, v: int, m: int, *, columns: str, contiguous: int = 1
) -> tuple[SparseVenom, HiddenStats]:
    """See `sparse_lm.ops.sampled_squared_relu_venom`.

    Raises:
      NotImplementedError: the dtypes, block, v, m, or the choice of columns.
    """
    return squared_relu_venom(sampled_matmul_24(w, x, neuron_ids, block, contiguous=contiguous), v, m, columns=columns)
