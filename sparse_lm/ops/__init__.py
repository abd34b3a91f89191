"""Operations on arrays: sparse formats, selections, products. Knows nothing of models or training.

In shape annotations, which tests check, T are tokens, D is the model width, F are neurons, and S those that are kept.

`dtype` and `out_dtype` are those of results, by default that of the dense operand, and of `matmul_24_fp8` bfloat16:
computed in float32, rounded once.
`implementation` names the backend that must run an op, or `NotImplementedError` is raised; the best one by default.
An operand of another format raises `TypeError`; one that is empty, and shapes, dtypes and numbers other than an op's
arguments say, raise `ValueError`.
"""

from sparse_lm.ops.compress import compress_24, condense, to_venom
from sparse_lm.ops.cross_entropy import cross_entropy
from sparse_lm.ops.formats import HiddenGradients, HiddenStats, Sparse24, SparseVenom
from sparse_lm.ops.grouped import grouped_down, grouped_up, grouped_weights
from sparse_lm.ops.hidden import (
    gated_squared_relu_24,
    gated_squared_relu_gradients,
    hidden_gradients,
    squared_relu_24,
    squared_relu_gradients,
    squared_relu_venom,
)
from sparse_lm.ops.matmul import matmul_24, matmul_24_fp8, matmul_venom, sampled_matmul_24, scattered_matmul_24
from sparse_lm.ops.norm import add_norm
from sparse_lm.ops.row_order import RowOrder
from sparse_lm.ops.select import TRANSPOSABLE_PATTERNS, transposable_mask, venom_columns
from sparse_lm.ops.sparsify import (
    soft_threshold_24,
    soft_threshold_scale,
    sparsify_24,
    sparsify_24_tiles,
    sparsify_venom,
)

__all__ = [
    "TRANSPOSABLE_PATTERNS",
    "HiddenGradients",
    "HiddenStats",
    "RowOrder",
    "Sparse24",
    "SparseVenom",
    "add_norm",
    "compress_24",
    "condense",
    "cross_entropy",
    "gated_squared_relu_24",
    "gated_squared_relu_gradients",
    "grouped_down",
    "grouped_up",
    "grouped_weights",
    "hidden_gradients",
    "matmul_24",
    "matmul_24_fp8",
    "matmul_venom",
    "sampled_matmul_24",
    "scattered_matmul_24",
    "soft_threshold_24",
    "soft_threshold_scale",
    "sparsify_24",
    "sparsify_24_tiles",
    "sparsify_venom",
    "squared_relu_24",
    "squared_relu_gradients",
    "squared_relu_venom",
    "to_venom",
    "transposable_mask",
    "venom_columns",
]
