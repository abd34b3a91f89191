import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops.row_order import combine, dispatch
from tests.ops.operands import random, random_rows


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("padding", [0, 35])
def test_combine_inverts_dispatch_and_padding_is_zero(dtype, padding):
    x, rows = random((61, 6), dtype, seed=0), random_rows(61, 61 + padding, seed=1)
    y = jax.jit(dispatch)(x, rows)
    np.testing.assert_array_equal(jax.jit(combine)(y, rows), x)
    np.testing.assert_array_equal(y, np.pad(x, ((0, 1), (0, 0)))[np.asarray(rows.slots)])
