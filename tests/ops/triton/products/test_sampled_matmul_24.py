import functools

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import triton
from sparse_lm.ops.triton.products.sampled_matmul_24 import CANDIDATES
from tests.ops.operands import assert_agree, random, random_24, random_columns
from tests.ops.properties import sampled_matmul_24 as properties


@pytest.mark.gpu
@pytest.mark.parametrize("config", CANDIDATES)
@pytest.mark.parametrize(
    "tokens, dim, neurons, kept, blocks_of_tile",
    [(768, 512, 1024, 512, 1), (1000, 333, 1280, 601, 2), (300, 64, 500, 500, 1), (1, 100, 64, 8, 1)],
)
def test_matches_reference(tokens, dim, neurons, kept, blocks_of_tile, config):
    v = blocks_of_tile * config.tile_n
    properties.check_shape(triton.sampled_matmul_24, tokens, dim, neurons, kept, v, config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)])
@pytest.mark.parametrize("v", [64, 128])
@pytest.mark.parametrize("contiguous", [1, 32])
def test_dtypes(dtype, out_dtype, v, contiguous):
    properties.check_dtypes(triton.sampled_matmul_24, dtype, out_dtype, v, contiguous)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_reach_the_blocks_that_list_them_and_no_other(bad):
    properties.check_bad_numbers(triton.sampled_matmul_24, bad, 64)


@pytest.mark.gpu
def test_tilings_agree_bit_for_bit():
    w, x = random_24(4096, 1024, jnp.bfloat16, seed=8), random((4096, 1024), jnp.bfloat16, seed=9)
    columns = random_columns(32, 1024, 4096, seed=10)
    products = [functools.partial(triton.sampled_matmul_24, v=128, config=config) for config in CANDIDATES]
    assert_agree(products, w, x, columns)


def test_refuses_small_blocks():
    w, x = random_24(64, 64, jnp.bfloat16, seed=0), random((64, 64), jnp.bfloat16, seed=1)
    with pytest.raises(NotImplementedError, match="multiple of 64"):
        triton.sampled_matmul_24(w, x, random_columns(2, 16, 64, seed=2), 32)
