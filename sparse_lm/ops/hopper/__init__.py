"""Kernels for NVIDIA Hopper (sm_90), in Pallas Mosaic GPU: one file a kernel.

The functions have the names and arguments of the public ops, less `implementation`, and refuse what
they cannot do with `NotImplementedError(reason)`. Products also take a `config`, their tiling.

    products       matmul_24, matmul_venom, matmul_venom_contiguous, scattered_matmul_24,
                   sampled_matmul_24, sampled_rows_24, sampled_squared_relu_24, sampled_squared_relu_venom
      frame        persistent, tiling, ring, mainloop, and the instruction in wgmma_sp
      copies       gather, gather_24
      schedules    schedule, split_k, stream_k, partial_sums
      results      store, store_rows
      choices      operands, device, tuning
    passes         sparsify_24, sparsify_24_tiles, sparsify_venom, squared_relu_24, squared_relu_gradients
      selection    two_of_four (float32), packed_24 (16-bit floats), mvue
      threads      thread_tile
    both           emit, compat
"""

from sparse_lm.ops.hopper.passes.sparsify_24 import soft_threshold_24, sparsify_24
from sparse_lm.ops.hopper.passes.sparsify_24_tiles import sparsify_24_tiles
from sparse_lm.ops.hopper.passes.sparsify_venom import sparsify_venom, squared_relu_venom
from sparse_lm.ops.hopper.passes.squared_relu_24 import squared_relu_24
from sparse_lm.ops.hopper.passes.squared_relu_gradients import squared_relu_gradients
from sparse_lm.ops.hopper.products.matmul_24 import matmul_24
from sparse_lm.ops.hopper.products.matmul_venom import matmul_venom
from sparse_lm.ops.hopper.products.sampled_matmul_24 import sampled_matmul_24
from sparse_lm.ops.hopper.products.sampled_squared_relu_24 import sampled_squared_relu_24
from sparse_lm.ops.hopper.products.sampled_squared_relu_venom import sampled_squared_relu_venom
from sparse_lm.ops.hopper.products.scattered_matmul_24 import scattered_matmul_24

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
