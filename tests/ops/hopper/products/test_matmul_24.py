import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper
from sparse_lm.ops.hopper.frame import split_k
from sparse_lm.ops.hopper.products.matmul_24 import Config, heuristic_config
from tests.ops.operands import (
    PAIRS,
    assert_agree,
    assert_as_good_as_reference,
    assert_repeats,
    random,
    random_24,
)
from tests.ops.properties import matmul_24 as properties

LARGE, SMALL = Config(tile_m=256, tile_n=192), Config(tile_m=128, tile_n=256)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [LARGE, SMALL, Config(128, 128, stages=6, cluster=1)])
@pytest.mark.parametrize("out_transposed", [False, True])
@pytest.mark.parametrize("m, k, n", [(512, 320, 768), (300, 333, 1001), (64, 64, 64), (1000, 2000, 200), (1, 4, 1)])
def test_matches_reference(m, k, n, out_transposed, config):
    properties.check_shape(hopper.matmul_24, m, k, n, out_transposed=out_transposed, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, out_dtype", [(jnp.float16, None), (jnp.bfloat16, jnp.float32), (jnp.float16, jnp.bfloat16)]
)
@pytest.mark.parametrize("out_transposed", [False, True])
def test_dtypes(dtype, out_dtype, out_transposed):
    properties.check_dtypes(hopper.matmul_24, dtype, out_dtype, out_transposed=out_transposed)


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [[(0, 1)], [(2, 3)], [(0, 3)], [(0, 1), (2, 3)], PAIRS])
def test_every_pattern_of_positions(pairs):
    properties.check_positions(hopper.matmul_24, pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_reach_the_rows_that_read_them_and_no_other(bad):
    properties.check_bad_numbers(hopper.matmul_24, bad)


@pytest.mark.gpu
def test_schedules_agree_bit_for_bit():
    """Unsplit, the order of summation is that of k, whatever the tiling: a race would show as a difference."""
    w, b = random_24(2048, 2048, jnp.bfloat16, seed=8), random((2048, 2048), jnp.bfloat16, seed=9)
    others = [Config(128, 192, stages=3), Config(256, 128, cluster=1), Config(128, 64, stages=7, cluster=4)]
    configs = [dataclasses.replace(config, split_tail=False) for config in (LARGE, SMALL, *others)]
    assert_agree([functools.partial(hopper.matmul_24, config=config) for config in configs], w, b)


@pytest.mark.parametrize("dtype, b_dtype, out_dtype", [(jnp.float32,) * 3, (jnp.bfloat16, jnp.float16, None)])
def test_refuses_dtypes(dtype, b_dtype, out_dtype):
    properties.check_refuses_dtypes(hopper.matmul_24, dtype, b_dtype, out_dtype)


def test_heuristic_counts_waves():
    assert heuristic_config(8192, 8192, 8192) == LARGE
    assert heuristic_config(128, 256 * 132, 64) == SMALL  # one wave of 132 tiles, all of them needed


@pytest.mark.gpu
@pytest.mark.parametrize("config", [LARGE, SMALL])
@pytest.mark.parametrize("m, k, n", [(256, 4096, 192), (300, 1100, 1001), (2048, 1536, 16384), (1024, 4096, 1024)])
def test_tiles_split_along_k(m, k, n, config):
    w, b = random_24(m, k, jnp.bfloat16, seed=10), random((k, n), jnp.bfloat16, seed=11)
    out = assert_repeats(functools.partial(hopper.matmul_24, out_transposed=True, config=config), w, b).T
    reference = jnp.matmul(w.to_dense(), b, preferred_element_type=jnp.float32)
    assert_as_good_as_reference(out, reference.astype(jnp.bfloat16), reference)


def test_plan_covers_every_step_once():
    for tiles, clusters, steps in [(344, 66, 128), (352, 66, 128), (688, 66, 128), (5, 66, 17), (66, 66, 8)]:
        plan = split_k.plan(tiles, clusters, steps, split=True)
        assert plan.waves * clusters + plan.tail_tiles == tiles
        assert (plan.parts - 1) * plan.part_steps < steps <= plan.parts * plan.part_steps
        assert plan.tail_tiles * plan.parts <= plan.clusters <= clusters
        assert split_k.plan(tiles, clusters, steps, split=False).parts == 1
