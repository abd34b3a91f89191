"""The compressed layout against one that is decoded by the book, an entry at a time."""

import numpy as np
import pytest

from sparse_lm.interop.bitmask_24 import compress


def decode(name, tensors):
    (rows,), (columns,) = tensors[f"{name}.shape"]
    values, bitmask = (tensors[f"{name}.{part}"] for part in ("compressed", "bitmask"))
    dense = np.zeros((rows, columns), values.dtype)
    for row in range(rows):
        remaining = iter(values[row])
        for column in range(columns):
            if bitmask[row, column // 8] >> column % 8 & 1:
                dense[row, column] = next(remaining)
        assert next(remaining, None) is None
    return dense


def random_24(rows, columns, nonzeros, seed):
    rng = np.random.default_rng(seed)
    keep = np.argsort(rng.random((rows, columns // 4, 4)), axis=-1) < nonzeros
    return (rng.normal(size=keep.shape) * keep).reshape(rows, columns).astype(np.float32)


@pytest.mark.parametrize("shape", [(5, 64), (3, 12), (1, 4)])
@pytest.mark.parametrize("nonzeros", [2, 1, 0])
def test_decodes_to_the_matrix(shape, nonzeros):
    weight = random_24(*shape, nonzeros, seed=nonzeros)
    tensors = compress("layer", weight)
    np.testing.assert_array_equal(decode("layer", tensors), weight)
    assert tensors["layer.compressed"].shape == (shape[0], shape[1] // 2)


def test_a_matrix_that_is_not_24_is_refused():
    weight = random_24(6, 16, 2, seed=3)
    weight[4, 8:11] = 1
    with pytest.raises(ValueError, match="layer has more than two non-zeros in a group of four"):
        compress("layer", weight)
