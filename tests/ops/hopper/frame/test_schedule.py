import jax.numpy as jnp
import numpy as np

from sparse_lm.ops.hopper.frame.schedule import rows_in_use


def test_rows_in_use_end_with_the_last_block_that_lists_anything():
    lists = jnp.array([[0, 3], [6, 6], [2, 6], [6, 6], [6, 6]], jnp.int32)  # 6: nothing
    np.testing.assert_array_equal(rows_in_use(lists, 8, 6), [24])
    np.testing.assert_array_equal(rows_in_use(jnp.full((2, 2), 6, jnp.int32), 8, 6), [0])
