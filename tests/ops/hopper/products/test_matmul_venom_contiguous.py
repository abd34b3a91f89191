import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper
from sparse_lm.ops.hopper.products.matmul_venom_contiguous import CANDIDATES, heuristic_config, matmul_venom_contiguous
from tests.ops.operands import (
    assert_repeats,
    random,
    random_venom_contiguous,
)
from tests.ops.properties import matmul_venom as properties

CONFIGS = [config for config, _ in CANDIDATES]


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "rows, k, kept, n, v, contiguous",
    [
        (1024, 1024, 512, 768, 256, 512),
        (1000, 2048, 640, 200, 256, 128),
        (300, 384, 192, 1001, 512, 64),
        (1, 256, 64, 1, 256, 64),
        (700, 8192, 2048, 1024, 256, 2048),
    ],
)
def test_matches_reference(rows, k, kept, n, v, contiguous, config):
    a = random_venom_contiguous(rows, k, kept, v, contiguous, jnp.bfloat16, seed=0)
    b = random((k, n), jnp.bfloat16, seed=2)
    properties.check(matmul_venom_contiguous, a, b, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)])
@pytest.mark.parametrize("v", [128, 256])
def test_dtypes(dtype, out_dtype, v):
    a = random_venom_contiguous(700, 1024, 256, v, 128, dtype, seed=3)
    b = random((1024, 512), dtype, seed=5)
    properties.check(hopper.matmul_venom, a, b, out_dtype=out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("tokens, n", [(2000, 512), (333, 200), (129, 1001)])
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float32)])
def test_puts_rows_back_in_the_order_of_the_tokens(tokens, n, dtype, out_dtype, config):
    random_a = functools.partial(random_venom_contiguous, k=1024, kept=256, v=256, contiguous=64, dtype=dtype, seed=15)
    properties.check_order_of_tokens(matmul_venom_contiguous, random_a, tokens, n, 256, dtype, out_dtype, config)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("config", CONFIGS)
def test_bad_numbers_in_rows_that_no_block_lists_do_no_harm(bad, config):
    a = random_venom_contiguous(512, 1024, 192, 256, 64, jnp.bfloat16, seed=6)
    a = dataclasses.replace(a, columns=a.columns.at[1].set(a.columns[0]))
    b = random((1024, 512), jnp.bfloat16, seed=8)
    unlisted = np.setdiff1d(np.arange(1024), np.asarray(a.columns))
    out = matmul_venom_contiguous(a, b.at[unlisted].set(bad), config=config)
    np.testing.assert_array_equal(out, matmul_venom_contiguous(a, b, config=config))
    listed = int(a.columns[0, 3])
    out = matmul_venom_contiguous(a, b.at[listed].set(bad), config=config)
    np.testing.assert_array_equal(~np.isfinite(out).all(axis=1), np.asarray(a.mask())[:, listed])


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kept", [512, 320])  # an even and an odd number of steps
def test_blocks_that_list_nothing_are_zeros(kept, config):
    a = random_venom_contiguous(9 * 256, 1280, kept, 256, 64, jnp.bfloat16, seed=9)
    b = random((1280, 1000), jnp.bfloat16, seed=11)
    nothing = jnp.array([2, 6, 7, 8])
    product = lambda columns: matmul_venom_contiguous(dataclasses.replace(a, columns=columns), b, config=config)  # noqa: E731
    expected = product(a.columns).reshape(9, 256, 1000).at[nothing].set(0).reshape(9 * 256, 1000)
    np.testing.assert_array_equal(assert_repeats(product, a.columns.at[nothing].set(1280)), expected)
    assert not assert_repeats(product, jnp.full_like(a.columns, 1280)).any()


def test_refuses_small_blocks_and_ragged_slices():
    b = random((128, 64), jnp.bfloat16, seed=1)
    with pytest.raises(NotImplementedError, match="multiple of 128"):
        matmul_venom_contiguous(random_venom_contiguous(64, 128, 64, 64, 64, jnp.bfloat16, seed=0), b)
    with pytest.raises(NotImplementedError, match="multiple of 64, not 96"):
        matmul_venom_contiguous(random_venom_contiguous(64, 192, 96, 128, 96, jnp.bfloat16, seed=0), b)


def test_heuristic_keeps_clusters_inside_of_blocks():
    assert heuristic_config(16384, 4096, 4096, v=256).cluster_m == 256
    assert heuristic_config(16384, 4096, 4096, v=128).cluster_m == 128
