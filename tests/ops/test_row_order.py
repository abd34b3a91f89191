"""Orders of rows move numbers without changing any."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import row_order
from sparse_lm.ops.row_order import RowOrder

T = 20


@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_in_slots_are_those_of_numpy_and_padding_is_zero(dtype, width):
    rng = np.random.default_rng(width)
    x = np.asarray(jnp.asarray(rng.standard_normal((T, width)), dtype))
    slots = np.concatenate([rng.permutation(T), np.full(5, T)]).astype(np.int32)
    padded = np.concatenate([x, np.zeros((1, width), x.dtype)])

    got = jax.jit(row_order.dispatch)(jnp.asarray(x), RowOrder(jnp.asarray(slots), jnp.zeros(T, jnp.int32)))

    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, padded[slots])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_scaled_rows_are_rounded_once(dtype):
    rng = np.random.default_rng(3)
    x = np.asarray(jnp.asarray(rng.standard_normal((T, 6)), dtype))
    rows = rng.integers(T + 1, size=50, dtype=np.int32)
    scale = rng.random(50, np.float32)
    padded = np.concatenate([x, np.zeros((1, 6), x.dtype)]).astype(np.float32)

    got = jax.jit(row_order.take_rows)(*map(jnp.asarray, (x, rows, scale)))

    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, (padded[rows] * scale[:, None]).astype(x.dtype))
