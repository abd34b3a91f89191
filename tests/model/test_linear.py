"""Products with a float32 matrix against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.model.linear import exact_linear


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_exact_as_float32(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dy = (
        jax.random.normal(key, shape) for key, shape in zip(keys, [(96, 320), (16, 320), (96, 16)], strict=True)
    )
    x = x.astype(dtype)
    y, vjp = jax.vjp(jax.jit(exact_linear), x, w)
    dx, dw = vjp(dy)
    exact = [np.asarray(a, np.float64) for a in (x, w, dy)]
    for found, wanted, summands in (
        (y, exact[0] @ exact[1].T, np.abs(exact[0]) @ np.abs(exact[1]).T),
        (dw, exact[2].T @ exact[0], np.abs(exact[2]).T @ np.abs(exact[0])),
    ):
        assert found.dtype == jnp.float32
        assert (np.abs(found - wanted) <= 2**-22 * summands).all()
    wanted, summands = exact[2] @ exact[1], np.abs(exact[2]) @ np.abs(exact[1])
    assert dx.dtype == x.dtype
    rounding = jnp.finfo(dtype).eps / 2 * np.abs(wanted)
    of_products = 2**-22 if dtype == "float32" else 2**-15
    assert (np.abs(np.asarray(dx, np.float64) - wanted) <= 1.01 * rounding + of_products * summands).all()
