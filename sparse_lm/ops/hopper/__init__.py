"""Kernels for NVIDIA Hopper (sm_90), in Pallas Mosaic GPU.

The functions have the names and arguments of the public ops, less `implementation`, and refuse what
they cannot do with `NotImplementedError(reason)`. Products with a 2:4 operand also take a `config`, their tiling.

    products       matmul_24, matmul_venom, scattered_matmul_24, sampled_matmul_24, sampled_rows_24;
                   dense products in grouped (experts) and cross_entropy (the loss), whose loops are Pallas' own
      frame        persistent, tiling, ring, and the instruction in wgmma_sp
      copies       gather, gather_24
      schedules    schedule, split_k, stream_k, partial_sums
      results      store
    passes         sparsify_24, sparsify_24_tiles, squared_relu_24, squared_relu_venom, squared_relu_gradients,
                   gated_squared_relu, hidden_gradients; add_norm and fp8_rows, whose loops are Pallas' own
      selection    two_of_four (float32), packed_24 (16-bit floats), mvue; hidden_stats, row_sums
      threads      thread_tile, shared_words
    both           emit (what threads do), operands (arrays), compat
"""

from __future__ import annotations

import jax

from sparse_lm.ops import backends

_MODULES = {
    "products.cross_entropy": ("cross_entropy",),
    "products.grouped": ("grouped_down", "grouped_up", "grouped_weights"),
    "products.matmul_24": ("matmul_24", "matmul_24_fp8"),
    "products.matmul_venom": ("matmul_venom",),
    "products.sampled_matmul_24": ("sampled_matmul_24",),
    "products.scattered_matmul_24": ("scattered_matmul_24",),
    "passes.add_norm": ("add_norm",),
    "passes.fp8_rows": ("fp8_rows", "fp8_squared_relu", "fp8_squared_relu_gradients"),
    "passes.gated_squared_relu": ("gated_squared_relu_24", "gated_squared_relu_gradients"),
    "passes.hidden_gradients": ("hidden_gradients",),
    "passes.sparsify_24": ("soft_threshold_24", "sparsify_24"),
    "passes.sparsify_24_tiles": ("sparsify_24_tiles",),
    "passes.squared_relu_24": ("squared_relu_24",),
    "passes.squared_relu_gradients": ("squared_relu_gradients",),
    "passes.squared_relu_venom": ("squared_relu_venom",),
}
__all__ = [name for names in _MODULES.values() for name in names]


def unavailable(device: jax.Device) -> str | None:
    """Says why a device cannot run these kernels, or returns None if it can."""
    if not device.device_kind.startswith("NVIDIA"):
        return f"needs an NVIDIA GPU; this process runs on {device.device_kind}"
    if int(device.compute_capability.split(".")[0]) != 9:
        return f"needs compute capability 9.x; {device.device_kind} has {device.compute_capability}"
    if jax.config.jax_enable_x64:
        return "needs jax_enable_x64 off: its kernels count in int32"
    return backends.import_error(__name__, _MODULES)


__getattr__ = backends.functions(__name__, _MODULES)
