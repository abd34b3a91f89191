"""Of `matmul_venom`, which may also take a tiling, `config`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.operands import assert_as_good_as_reference, assert_repeats, random, random_rows, random_venom


def exact(a, b):
    return np.asarray(a.to_dense(), np.float64) @ np.asarray(b, np.float64)


def check(matmul_venom, a, b, *, out_dtype=None, config=None):
    out = assert_repeats(lambda a, b: matmul_venom(a, b, out_dtype=out_dtype, config=config), a, b)
    reference = jnp.matmul(a.to_dense(), b, preferred_element_type=jnp.float32).astype(out_dtype or b.dtype)
    assert_as_good_as_reference(out, reference, exact(a, b))


def check_shape(matmul_venom, rows, k, n, v, m, config):
    a, b = random_venom(rows, k, v, m, jnp.bfloat16, seed=0), random((k, n), jnp.bfloat16, seed=2)
    check(matmul_venom, a, b, config=config)


def check_dtypes(matmul_venom, dtype, out_dtype, v):
    a, b = random_venom(256, 512, v, 16, dtype, seed=3), random((512, 256), dtype, seed=5)
    check(matmul_venom, a, b, out_dtype=out_dtype)


def check_order_of_tokens(matmul_venom, random_a, tokens, n, v, dtype, out_dtype, config):
    """Rows go back into it bit for bit; `random_a` gives a matrix of so many rows and 1024 columns."""
    rows = random_rows(tokens, (tokens + 2 * v) // v * v, seed=14)
    a, b = random_a(rows.slots.shape[0]), random((1024, n), dtype, seed=16)
    product = functools.partial(matmul_venom, config=config, out_dtype=out_dtype)
    out = assert_repeats(lambda a, b, rows: product(a, b, rows=rows), a, b, rows)
    position = np.asarray(rows.position)
    np.testing.assert_array_equal(out, np.asarray(jax.jit(product)(a, b))[position])
    reference = jnp.matmul(a.to_dense(), b, preferred_element_type=jnp.float32).astype(out_dtype)
    assert_as_good_as_reference(out, reference[position], exact(a, b)[position])


def check_bad_numbers(matmul_venom, bad):
    """In rows that no block keeps they do no harm."""
    a, b = random_venom(256, 512, 128, 16, jnp.bfloat16, seed=6), random((512, 256), jnp.bfloat16, seed=8)
    kept_by_neither = np.setdiff1d(np.arange(512), np.asarray(a.columns))
    kept_by_first = np.setdiff1d(np.asarray(a.columns[0]), np.asarray(a.columns[1]))
    out = matmul_venom(a, b.at[kept_by_neither].set(bad))
    np.testing.assert_array_equal(out, matmul_venom(a, b))
    out = matmul_venom(a, b.at[kept_by_first[0]].set(bad))
    np.testing.assert_array_equal(~np.isfinite(out).all(axis=1), np.asarray(a.mask())[:, kept_by_first[0]])


def check_refuses_small_blocks(matmul_venom):
    a = random_venom(64, 64, 32, 16, jnp.bfloat16, seed=0)
    with pytest.raises(NotImplementedError, match="multiple of 64"):
        matmul_venom(a, random((64, 64), jnp.bfloat16, seed=1))
