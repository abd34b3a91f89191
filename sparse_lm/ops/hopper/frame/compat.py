"""Differences between the JAX releases that this package supports (0.10.2 to 0.11.x)."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array

# Registers of a wgmma accumulator, one float32 each. Public code has no name for this layout yet.
ACCUMULATOR = plgpu.Layout._WGMMA_ACC_32BIT

# Whether Mosaic loads the transpose of a swizzled tile, and stores that of 16-bit registers with `stmatrix`. If not, it
# stores element by element, and loads none.
TRANSPOSES = jax.__version_info__ >= (0, 11)

_LOAD_ALL = () if jax.__version_info__ >= (0, 11) else ((),)  # indices that `plgpu.load` takes


def load(ref: Any, layout: Any, **options) -> Array:
    """Loads all of what a reference is to."""
    return plgpu.load(ref, *_LOAD_ALL, layout=layout, **options)
