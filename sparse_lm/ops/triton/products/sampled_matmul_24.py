"""Multiplies listed rows of a 2:4 matrix by the rows of a dense one, block by block.

All tokens of a tile lie in one block. A listed row's values are copied like any other's; its metadata is half of a
word, so that two words are copied for each that the instruction reads, and their halves put together.
"""

from __future__ import annotations

from jax import Array
from jax.typing import DTypeLike

from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.triton.frame.product import multiply
from sparse_lm.ops.triton.frame.tiling import Tiling, largest_that_occupies

# Largest first. M counts listed rows, N tokens.
CANDIDATES = (
    Tiling(128, 128, warps_m=2, warps_n=4, stages=3),
    Tiling(128, 64, warps_m=2, warps_n=2, stages=3),
    Tiling(64, 64, warps_m=2, warps_n=2, stages=4),
)


def sampled_matmul_24(
    w: Sparse24,
    x: Array,
    neuron_ids: Array,
    v: int,
    *,
    contiguous: int = 1,
    out_dtype: DTypeLike | None = None,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.sampled_matmul_24`; refuses all but 16-bit floats, and a v that is no multiple of 64."""
    del contiguous  # neurons are gathered one by one
    kept = neuron_ids.shape[1]
    tiling = config or largest_that_occupies(CANDIDATES, kept, x.shape[0], block_n=v)
    options = dict(tiling=tiling, out_dtype=out_dtype, b_transposed=True, out_transposed=True, lists="a", v=v)
    return multiply("sampled_matmul_24", w, x, kept, neuron_ids=neuron_ids, **options)
