import jax.numpy as jnp
import numpy as np

from sparse_lm.ops.row_order import inverted_index


def test_which_blocks_keep_each_slice():
    lists = jnp.array([[4, 0], [1, 4], [0, 1], [6, 7]])  # the last one lists nothing that there is
    places, counts = inverted_index(lists, 6)
    none = 4 * 2
    expected = [[1, 4], [2, 5], [], [], [0, 3], []]
    np.testing.assert_array_equal(places, [row + [none] * (6 - len(row)) for row in expected])
    np.testing.assert_array_equal(counts, list(map(len, expected)))
