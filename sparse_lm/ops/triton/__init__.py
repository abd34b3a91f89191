"""Kernels for NVIDIA GPUs from compute capability 8.0 on, in Triton: products in Gluon, selections in plain Triton.

The functions have the names and arguments of the public ops, less `implementation`, and refuse what
they cannot do with `NotImplementedError(reason)`.
"""

from sparse_lm.ops.triton.matmul_24 import matmul_24
from sparse_lm.ops.triton.matmul_venom import matmul_venom

__all__ = ["matmul_24", "matmul_venom"]
