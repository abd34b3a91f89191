import functools

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper
from sparse_lm.ops.hopper.products.matmul_venom import CANDIDATES, Config, heuristic_config
from tests.ops.operands import (
    assert_agree,
    random,
    random_venom,
    random_venom_contiguous,
)
from tests.ops.properties import matmul_venom as properties

CONFIGS = [config for config, _ in CANDIDATES] + [Config(128, 256, stages=3, cluster=1, store_slots=4)]


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "rows, k, n, v, m",
    [
        (512, 1024, 512, 256, 16),
        (300, 1008, 200, 256, 16),
        (1000, 960, 261, 512, 8),
        (1, 4, 1, 256, 4),
    ],
)
def test_matches_reference(rows, k, n, v, m, config):
    v = v * config.tile_m // 256
    properties.check_shape(hopper.matmul_venom, rows, k, n, v, m, config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)])
@pytest.mark.parametrize("v", [64, 128, 256])
def test_dtypes(dtype, out_dtype, v):
    properties.check_dtypes(hopper.matmul_venom, dtype, out_dtype, v)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("tokens, n", [(2000, 512), (333, 200), (129, 1001)])
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float32)])
def test_puts_rows_back_in_the_order_of_the_tokens(tokens, n, dtype, out_dtype, config):
    v = max(128, config.tile_m)
    random_a = functools.partial(random_venom, k=1024, v=v, m=16, dtype=dtype, seed=15)
    properties.check_order_of_tokens(hopper.matmul_venom, random_a, tokens, n, v, dtype, out_dtype, config)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_in_rows_that_no_block_keeps_do_no_harm(bad):
    properties.check_bad_numbers(hopper.matmul_venom, bad)


@pytest.mark.gpu
def test_schedules_agree_bit_for_bit():
    """Too short to be split along k, a tile is summed in the order of k: a race would show as a difference."""
    a, b = random_venom(4096, 1024, 256, 8, jnp.bfloat16, seed=9), random((1024, 4096), jnp.bfloat16, seed=11)
    assert_agree([functools.partial(hopper.matmul_venom, config=config) for config in CONFIGS], a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("v, contiguous", [(64, 64), (128, 96)])
def test_gathers_contiguous_columns_that_no_box_fits(v, contiguous):
    a = random_venom_contiguous(300, 768, 192, v, contiguous, jnp.bfloat16, seed=12)
    b = random((768, 256), jnp.bfloat16, seed=14)
    properties.check(hopper.matmul_venom, a, b)


def test_heuristic_counts_waves_of_tiles_inside_of_blocks():
    assert heuristic_config(16384, 2048, 2048, 256) == Config(256, 128, raster_width=4)
    assert heuristic_config(16384, 4096, 4096, 512) == Config(256, 192)  # 2048 columns are no multiple of it
    assert heuristic_config(16384, 4096, 4096, 384) == Config(128, 256)
    assert heuristic_config(16384, 4096, 4096, 192) == Config(64, 256)


def test_refuses_small_blocks():
    properties.check_refuses_small_blocks(hopper.matmul_venom)
