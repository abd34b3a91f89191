import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import triton
from sparse_lm.ops.triton.matmul_venom import CANDIDATES
from tests.ops.hopper.operands import (
    assert_as_good_as_reference,
    assert_repeats,
    random,
    random_venom,
    random_venom_in_runs,
)


def _exact(a, b):
    return np.asarray(a.to_dense(), np.float64) @ np.asarray(b, np.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CANDIDATES)
@pytest.mark.parametrize(
    "rows, k, n, blocks_of_tile, m",
    [(512, 1024, 512, 1, 16), (300, 1008, 261, 1, 16), (1000, 960, 200, 2, 8), (1, 4, 1, 1, 4)],
)
def test_matches_reference(rows, k, n, blocks_of_tile, m, config):
    v = blocks_of_tile * config.tile_m
    a, b = random_venom(rows, k, v, m, jnp.bfloat16, seed=0), random((k, n), jnp.bfloat16, seed=2)
    out = assert_repeats(lambda a, b: triton.matmul_venom(a, b, config=config), a, b)
    assert_as_good_as_reference(out, a.to_dense() @ b, _exact(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)])
@pytest.mark.parametrize("v", [64, 128, 256])
def test_dtypes(dtype, out_dtype, v):
    a, b = random_venom(256, 512, v, 16, dtype, seed=3), random((512, 256), dtype, seed=5)
    out = assert_repeats(lambda a, b: triton.matmul_venom(a, b, out_dtype=out_dtype), a, b)
    reference = jnp.matmul(a.to_dense(), b, preferred_element_type=out_dtype)
    assert_as_good_as_reference(out, reference, _exact(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_in_rows_that_no_block_keeps_do_no_harm(bad):
    a, b = random_venom(256, 512, 128, 16, jnp.bfloat16, seed=6), random((512, 256), jnp.bfloat16, seed=8)
    kept_by_neither = np.setdiff1d(np.arange(512), np.asarray(a.columns))
    kept_by_first = np.setdiff1d(np.asarray(a.columns[0]), np.asarray(a.columns[1]))
    out = triton.matmul_venom(a, b.at[kept_by_neither].set(bad))
    np.testing.assert_array_equal(out, triton.matmul_venom(a, b))
    out = triton.matmul_venom(a, b.at[kept_by_first[0]].set(bad))
    np.testing.assert_array_equal(~np.isfinite(out).all(axis=1), np.asarray(a.mask())[:, kept_by_first[0]])


@pytest.mark.gpu
def test_tilings_agree_bit_for_bit():
    """The order of summation is that of the condensed columns: a race would show as a difference."""
    a, b = random_venom(4096, 1024, 256, 8, jnp.bfloat16, seed=9), random((1024, 4096), jnp.bfloat16, seed=11)
    products = [lambda a, b, c=c: triton.matmul_venom(a, b, config=c) for c in CANDIDATES]
    results = [jax.jit(product)(a, b) for product in products for _ in range(5)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.gpu
def test_gathers_runs():
    a = random_venom_in_runs(300, 768, 192, 64, 64, jnp.bfloat16, seed=12)
    b = random((768, 256), jnp.bfloat16, seed=14)
    assert_as_good_as_reference(triton.matmul_venom(a, b), a.to_dense() @ b, _exact(a, b))


def test_refuses_small_blocks():
    a = random_venom(64, 64, 32, 16, jnp.bfloat16, seed=0)
    with pytest.raises(NotImplementedError, match="multiple of 64"):
        triton.matmul_venom(a, random((64, 64), jnp.bfloat16, seed=1))
