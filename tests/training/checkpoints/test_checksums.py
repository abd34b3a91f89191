"""Checksums against the formula in NumPy, which those of earlier checkpoints follow."""

import ml_dtypes
import numpy as np

from sparse_lm.training.checkpoints.checksums import checksums

SHAPES = [(), (3, 5), (2, 3, 4)]
DTYPES = [np.float32, ml_dtypes.bfloat16, np.int32, np.uint32, np.uint8, np.int8, bool]


def mix(words):
    words = (words ^ words >> np.uint64(16)) * np.uint64(0x85EBCA6B) % 2**32
    words = (words ^ words >> np.uint64(13)) * np.uint64(0xC2B2AE35) % 2**32
    return words ^ words >> np.uint64(16)


def formula(x):
    """In 64-bit integers, from a flat list of elements and their indices."""
    first = second = 0
    for index, element in np.ndenumerate(x):
        word = np.uint64(int.from_bytes(element.tobytes(), "little"))
        position = np.uint64(0)
        for along_axis in index:
            position = mix((position + np.uint64(along_axis + 1)) % 2**32)
        hashed = mix(word ^ position)
        first += int(hashed)
        second += int(mix((hashed + np.uint64(0x9E3779B9)) % 2**32))
    return [first % 2**32, second % 2**32]


def draw(rng, shape, dtype):
    if dtype is bool:
        return rng.random(shape) < 0.5
    return rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]


def test_are_the_formula():
    rng = np.random.default_rng(0)
    arrays = [draw(rng, shape, dtype) for shape in SHAPES for dtype in DTYPES]
    whole = checksums(arrays, (0,) * len(arrays))
    by_layer = checksums(arrays, tuple(min(x.ndim, 1) for x in arrays))
    for x, of_all, of_layers in zip(arrays, whole, by_layer, strict=True):
        assert of_all.tolist() == formula(x)
        assert of_layers.tolist() == ([formula(layer) for layer in x] if x.ndim else formula(x))
