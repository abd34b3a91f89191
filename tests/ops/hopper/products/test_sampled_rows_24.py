import functools

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper
from sparse_lm.ops.hopper.products.sampled_rows_24 import CANDIDATES, heuristic_config, sampled_rows_24
from tests.ops.operands import assert_agree, random, random_24, random_columns
from tests.ops.properties import sampled_matmul_24 as properties


@pytest.mark.gpu
@pytest.mark.parametrize("config", CANDIDATES)
@pytest.mark.parametrize(
    "tokens, dim, neurons, kept, blocks",
    [(768, 512, 1024, 512, 1), (1000, 333, 1280, 600, 2), (300, 64, 500, 500, 1), (1, 100, 64, 8, 1)],
)
def test_matches_reference(tokens, dim, neurons, kept, blocks, config):
    v = blocks * config.tokens
    properties.check_shape(sampled_rows_24, tokens, dim, neurons, kept, v, config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)])
@pytest.mark.parametrize("v", [64, 128, 256])
@pytest.mark.parametrize("contiguous", [1, 32])
def test_dtypes(dtype, out_dtype, v, contiguous):
    properties.check_dtypes(hopper.sampled_matmul_24, dtype, out_dtype, v, contiguous)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("config", CANDIDATES)
def test_bad_numbers_reach_the_blocks_that_list_them_and_no_other(bad, config):
    properties.check_bad_numbers(sampled_rows_24, bad, config.tokens, config)


@pytest.mark.gpu
def test_schedules_agree_bit_for_bit():
    w, x = random_24(4096, 1024, jnp.bfloat16, seed=8), random((4096, 1024), jnp.bfloat16, seed=9)
    columns = random_columns(16, 1024, 4096, seed=10)
    assert_agree([functools.partial(sampled_rows_24, v=256, config=config) for config in CANDIDATES], w, x, columns)


def test_heuristic_keeps_tiles_inside_of_blocks():
    for v in (64, 128, 192, 256, 384, 512):
        assert v % heuristic_config(v).tokens == 0


def test_refuses_ragged_blocks():
    w, x = random_24(64, 64, jnp.bfloat16, seed=0), random((64, 64), jnp.bfloat16, seed=1)
    with pytest.raises(NotImplementedError, match="multiple of 64, not 96"):
        hopper.sampled_matmul_24(w, x, jnp.arange(8)[None], 96)
