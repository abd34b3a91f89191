import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops.hopper.frame import operands


@pytest.mark.parametrize("shape, padded", [((64, 128), (64, 128)), ((60, 65), (64, 128)), ((1, 64), (64, 64))])
@pytest.mark.parametrize("rows", [False, True])
def test_ragged_edges_are_padded_with_zeros(rows, shape, padded):
    expected = np.zeros(padded if rows else (shape[0], padded[1]))
    expected[: shape[0], : shape[1]] = 1
    np.testing.assert_array_equal(operands.pad(jnp.ones(shape), rows=rows), expected)


@pytest.mark.parametrize("rows, columns, shape", [(1, 1, (64, 128)), (64, 64, (64, 128)), (65, 129, (128, 192))])
def test_results_have_whole_tiles_of_columns_at_least_two(rows, columns, shape):
    assert operands.result_type(rows, columns, jnp.float32).shape == shape
