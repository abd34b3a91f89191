"""Rounding to e4m3 in NumPy, independent of `sparse_lm`."""

import ml_dtypes
import numpy as np

LARGEST = 448


def scale(x, axis):
    """The power of two that brings the largest magnitude along `axis` into the upper half of e4m3's range."""
    largest = np.abs(x.astype(np.float64)).max(axis, keepdims=True)
    return 2.0 ** np.floor(np.log2(np.where(largest, largest, 1) / LARGEST) + 1)


def rounded(x, axis):
    """float64: x rounded to e4m3 with scales along `axis`."""
    return (x / scale(x, axis)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale(x, axis)


def sum_over_rows(a, b):
    """a^T b, where the scales of a's rows go over to b before it is rounded."""
    return (rounded(a, 1) / scale(a, 1)).T @ rounded(b * scale(a, 1), 0)
