import functools

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import triton
from sparse_lm.ops.triton.products.matmul_venom import CANDIDATES
from tests.ops.operands import (
    assert_agree,
    random,
    random_venom,
    random_venom_contiguous,
)
from tests.ops.properties import matmul_venom as properties


@pytest.mark.gpu
@pytest.mark.parametrize("config", CANDIDATES)
@pytest.mark.parametrize(
    "rows, k, n, blocks_of_tile, m",
    [(512, 1024, 512, 1, 16), (300, 1008, 261, 1, 16), (1000, 960, 200, 2, 8), (1, 4, 1, 1, 4)],
)
def test_matches_reference(rows, k, n, blocks_of_tile, m, config):
    v = blocks_of_tile * config.tile_m
    properties.check_shape(triton.matmul_venom, rows, k, n, v, m, config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)])
@pytest.mark.parametrize("v", [64, 128, 256])
def test_dtypes(dtype, out_dtype, v):
    properties.check_dtypes(triton.matmul_venom, dtype, out_dtype, v)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_in_rows_that_no_block_keeps_do_no_harm(bad):
    properties.check_bad_numbers(triton.matmul_venom, bad)


@pytest.mark.gpu
def test_tilings_agree_bit_for_bit():
    """The order of summation is that of the condensed columns: a race would show as a difference."""
    a, b = random_venom(4096, 1024, 256, 8, jnp.bfloat16, seed=9), random((1024, 4096), jnp.bfloat16, seed=11)
    assert_agree([functools.partial(triton.matmul_venom, config=config) for config in CANDIDATES], a, b)


@pytest.mark.gpu
def test_gathers_contiguous_columns():
    a = random_venom_contiguous(300, 768, 192, 64, 64, jnp.bfloat16, seed=12)
    b = random((768, 256), jnp.bfloat16, seed=14)
    properties.check(triton.matmul_venom, a, b)


def test_refuses_small_blocks():
    properties.check_refuses_small_blocks(triton.matmul_venom)
