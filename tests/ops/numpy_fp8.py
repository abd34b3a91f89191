"""Rounding to e4m3 in NumPy, independent of `sparse_lm`."""

import ml_dtypes
import numpy as np

LARGEST = 448


def rounded(x, axis):
    """float64: x rounded to e4m3 below the power of two that brings the largest magnitude along `axis` into range."""
    largest = np.abs(x.astype(np.float64)).max(axis, keepdims=True)
    scale = 2.0 ** np.floor(np.log2(np.where(largest, largest, 1) / LARGEST) + 1)
    return (x / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
