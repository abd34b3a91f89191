"""Checksums against the formula in NumPy, and what they notice."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_lm.training.checkpoints.checksums import checksum
from sparse_lm.training.checkpoints.manifest import ManifestError, describe


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


DTYPES = [np.float32, ml_dtypes.bfloat16, np.int32, np.uint32, np.uint8, np.int8, bool]


def draw(rng, shape, dtype):
    if dtype is bool:
        return rng.random(shape) < 0.5
    return rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]


@pytest.mark.parametrize("shape", [(), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_the_formula(shape, dtype):
    x = draw(np.random.default_rng(len(shape)), shape, dtype)
    assert checksum(x).tolist() == formula(x)
    if shape:
        assert checksum(x, axes_kept=1).tolist() == [formula(part) for part in x]


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), element=st.integers(0, 59), bit=st.integers(0, 31))
def test_any_flipped_bit_changes_both_halves(seed, element, bit):
    x = np.random.default_rng(seed).integers(0, 2**32, 60, np.uint32)
    flipped = x.copy()
    flipped[element] ^= np.uint32(1 << bit)
    before, after = checksum(x.reshape(5, 12)), checksum(flipped.reshape(5, 12))
    assert (np.asarray(before) != np.asarray(after)).all()


def make_manifest():
    arrays = {
        ("params", "norm"): jnp.arange(3.0),
        ("params", "layers", "up"): jnp.ones((2, 4, 4), jnp.bfloat16),
        ("state", "step"): jnp.int32(7),
    }
    return describe(7, arrays, {"model.dim": 4, "sparsity.recipe": "dense"}, {"eval_loss": float("nan")}), arrays


@pytest.mark.parametrize(
    "path, changed, message",
    [
        (("params", "norm"), jnp.arange(3.0).at[1].set(-0.0), "^params/norm has checksum"),
        (("state", "step"), jnp.uint32(7), r"^state/step is uint32\[\] and was saved as int32\[\]$"),
        (("params", "layers", "up"), jnp.ones((2, 4, 4), "bfloat16").at[1, 0, 0].set(2), "^params/layers/up, layer 1"),
    ],
)
def test_manifest_names_the_array_that_differs(path, changed, message):
    manifest, arrays = make_manifest()
    with pytest.raises(ManifestError, match=message):
        manifest.check({**arrays, path: changed})
