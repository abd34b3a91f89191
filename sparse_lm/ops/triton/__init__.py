"""Kernels for NVIDIA GPUs of compute capability 8.x and 9.x, in Gluon, the language under Triton.

The functions have the names and arguments of the public ops, less `implementation`, and refuse what
they cannot do with `NotImplementedError(reason)`.
"""

from sparse_lm.ops.triton.matmul_24 import matmul_24
from sparse_lm.ops.triton.matmul_venom import matmul_venom
from sparse_lm.ops.triton.sampled_matmul_24 import sampled_matmul_24
from sparse_lm.ops.triton.sampled_squared_relu_24 import sampled_squared_relu_24
from sparse_lm.ops.triton.sampled_squared_relu_venom import sampled_squared_relu_venom
from sparse_lm.ops.triton.scattered_matmul_24 import scattered_matmul_24
from sparse_lm.ops.triton.sparsify_24 import soft_threshold_24, sparsify_24, squared_relu_24
from sparse_lm.ops.triton.sparsify_24_tiles import sparsify_24_tiles
from sparse_lm.ops.triton.sparsify_venom import sparsify_venom, squared_relu_venom
from sparse_lm.ops.triton.squared_relu_gradients import squared_relu_gradients

__all__ = [
    "matmul_24",
    "matmul_venom",
    "sampled_matmul_24",
    "sampled_squared_relu_24",
    "sampled_squared_relu_venom",
    "scattered_matmul_24",
    "soft_threshold_24",
    "sparsify_24",
    "sparsify_24_tiles",
    "sparsify_venom",
    "squared_relu_24",
    "squared_relu_gradients",
    "squared_relu_venom",
]
