"""Sparse operations on arrays: formats, selections, products. Knows nothing of models or training."""

from sparse_lm.ops.columns import venom_columns
from sparse_lm.ops.compress import compress_24, compress_venom, condense
from sparse_lm.ops.formats import Sparse24, SparseVenom
from sparse_lm.ops.matmul import matmul_24, matmul_venom, sampled_matmul_24
from sparse_lm.ops.sparsify import soft_threshold_scale, sparsify_24, sparsify_24_tiles, sparsify_venom
from sparse_lm.ops.transposable import TRANSPOSABLE_PATTERNS, transposable_mask

__all__ = [
    "TRANSPOSABLE_PATTERNS",
    "Sparse24",
    "SparseVenom",
    "compress_24",
    "compress_venom",
    "condense",
    "matmul_24",
    "matmul_venom",
    "sampled_matmul_24",
    "soft_threshold_scale",
    "sparsify_24",
    "sparsify_24_tiles",
    "sparsify_venom",
    "transposable_mask",
    "venom_columns",
]
