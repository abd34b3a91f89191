"""Kernels for NVIDIA GPUs of compute capability 8.x, 9.0, 10.x and 12.x, in Gluon, the language under Triton.

They ran on compute capability 9.0. For the others they are compiled by tests and have never run.

Functions have the arguments that those of `hopper` have, and refuse what they cannot do likewise.

    products       matmul_24, matmul_venom, sampled_matmul_24, scattered_matmul_24
      frame        product, tiling, and the instruction in mma_sp
    passes         sparsify_24, squared_relu_gradients, gated_squared_relu
      selection    two_of_four (float32), packed_24 (16-bit floats), mvue
      tiles        tiles
    both           gluon_call, device
"""

from __future__ import annotations

import jax

from sparse_lm.ops import backends
from sparse_lm.ops.triton.frame.device import RAN_ON, SHARED_KIB

_MODULES = {
    "products": ("matmul_24", "matmul_venom", "sampled_matmul_24", "scattered_matmul_24"),
    "passes.gated_squared_relu": ("gated_squared_relu_24", "gated_squared_relu_gradients", "hidden_gradients"),
    "passes.sparsify_24": ("soft_threshold_24", "sparsify_24", "squared_relu_24"),
    "passes.squared_relu_gradients": ("squared_relu_gradients",),
}
__all__ = [name for names in _MODULES.values() for name in names]


def unavailable(device: jax.Device) -> str | None:
    """Says why a device cannot run these kernels, or returns None if it can."""
    if not device.device_kind.startswith("NVIDIA"):
        return f"needs an NVIDIA GPU; this process runs on {device.device_kind}"
    if _capability(device) not in SHARED_KIB:
        known = ", ".join(str(capability / 10) for capability in SHARED_KIB)
        return f"needs a compute capability of {known}; {device.device_kind} has {device.compute_capability}"
    return backends.import_error(__name__, _MODULES)


def caveat(device: jax.Device) -> str | None:
    """Says what is not known of these kernels on a device that can run them."""
    if _capability(device) == RAN_ON:
        return None
    return f"compiled for compute capability {device.compute_capability}, never run on it"


def _capability(device: jax.Device) -> int:
    return int(device.compute_capability.replace(".", ""))


__getattr__ = backends.functions(__name__, _MODULES)
