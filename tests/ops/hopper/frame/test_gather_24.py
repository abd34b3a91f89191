import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops.hopper.frame.gather_24 import metadata_by_rows
from tests.ops.numpy_sparse import compress

_EMPTY = 0, 1  # positions of a group with nothing to keep


def _by_rows(mask: np.ndarray) -> np.ndarray:
    """Word 4 p + t: four groups from column 128 p + 16 t and, in the upper half, four from 64 columns further on."""
    rows, columns = mask.shape
    words = np.zeros((rows, 4 * -(-columns // 128)), np.uint32)
    for row, p, t, half, group in np.ndindex(rows, words.shape[1] // 4, 4, 2, 4):
        start = 128 * p + 64 * half + 16 * t + 4 * group
        first, second = np.flatnonzero(mask[row, start : start + 4]) if start < columns else _EMPTY
        words[row, 4 * p + t] |= np.uint32((first | second << 2) << (16 * half + 4 * group))
    return words


@pytest.mark.parametrize("rows, columns", [(64, 64), (192, 320), (128, 256)])
def test_metadata_by_rows(rows, columns):
    two_of_four = np.tile([True, True, False, False], (rows, columns // 4, 1))
    mask = np.random.default_rng(rows).permuted(two_of_four, axis=-1).reshape(rows, columns)
    _, metadata = compress(mask.astype(np.float32), mask)

    result = metadata_by_rows(jnp.asarray(metadata.view(np.int32)))

    assert result.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(result).view(np.uint32), _by_rows(mask))
