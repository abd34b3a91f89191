import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper, reference
from sparse_lm.ops.hopper.matmul_venom import CANDIDATES, Config, heuristic_config
from tests.ops.hopper.operands import (
    assert_as_good_as_reference,
    assert_repeats,
    random,
    random_rows,
    random_venom,
    random_venom_in_runs,
)

CONFIGS = [config for config, _ in CANDIDATES] + [Config(128, 256, stages=3, cluster=1, store_slots=4)]


def _exact(a, b):
    return np.asarray(a.to_dense(), np.float64) @ np.asarray(b, np.float64)


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
    a, b = random_venom(rows, k, v, m, jnp.bfloat16, seed=0), random((k, n), jnp.bfloat16, seed=2)
    out = assert_repeats(lambda a, b: hopper.matmul_venom(a, b, config=config), a, b)
    assert_as_good_as_reference(out, a.to_dense() @ b, _exact(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)])
@pytest.mark.parametrize("v", [64, 128, 256])
def test_dtypes(dtype, out_dtype, v):
    a, b = random_venom(256, 512, v, 16, dtype, seed=3), random((512, 256), dtype, seed=5)
    out = assert_repeats(lambda a, b: hopper.matmul_venom(a, b, out_dtype=out_dtype), a, b)
    expected = jnp.matmul(a.to_dense(), b, preferred_element_type=out_dtype)
    assert_as_good_as_reference(out, expected, _exact(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("tokens, n", [(2000, 512), (333, 200), (129, 1001)])
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float32)])
def test_puts_rows_back_in_the_order_of_the_tokens(tokens, n, dtype, out_dtype, config):
    v = max(128, config.tile_m)
    rows = random_rows(tokens, 3, v, seed=14)
    slots = rows.slots.shape[0]
    a, b = random_venom(slots, 1024, v, 16, dtype, seed=15), random((1024, n), dtype, seed=16)
    product = functools.partial(hopper.matmul_venom, config=config, out_dtype=out_dtype)
    out = assert_repeats(lambda a, b, rows: product(a, b, rows=rows), a, b, rows)
    np.testing.assert_array_equal(out, np.asarray(jax.jit(product)(a, b))[np.asarray(rows.position)])
    exact = _exact(a, b)[np.asarray(rows.position)]
    assert_as_good_as_reference(out, reference.matmul_venom(a, b, rows=rows, out_dtype=out_dtype), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_in_rows_that_no_block_keeps_do_no_harm(bad):
    a, b = random_venom(256, 512, 128, 16, jnp.bfloat16, seed=6), random((512, 256), jnp.bfloat16, seed=8)
    kept_by_neither = np.setdiff1d(np.arange(512), np.asarray(a.columns))
    kept_by_first = np.setdiff1d(np.asarray(a.columns[0]), np.asarray(a.columns[1]))
    out = hopper.matmul_venom(a, b.at[kept_by_neither].set(bad))
    np.testing.assert_array_equal(out, hopper.matmul_venom(a, b))
    out = hopper.matmul_venom(a, b.at[kept_by_first[0]].set(bad))
    np.testing.assert_array_equal(~np.isfinite(out).all(axis=1), np.asarray(a.mask())[:, kept_by_first[0]])


@pytest.mark.gpu
def test_schedules_agree_bit_for_bit():
    """Too short to be split along k, a tile is summed in the order of k: a race would show as a difference."""
    a, b = random_venom(4096, 1024, 256, 8, jnp.bfloat16, seed=9), random((1024, 4096), jnp.bfloat16, seed=11)
    results = [jax.jit(lambda a, b, c=c: hopper.matmul_venom(a, b, config=c))(a, b) for c in CONFIGS for _ in range(5)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("v, run", [(64, 64), (128, 96)])
def test_gathers_runs_that_no_box_fits(v, run):
    a = random_venom_in_runs(300, 768, 192, v, run, jnp.bfloat16, seed=12)
    b = random((768, 256), jnp.bfloat16, seed=14)
    assert_as_good_as_reference(hopper.matmul_venom(a, b), a.to_dense() @ b, _exact(a, b))


def test_heuristic_counts_waves_of_tiles_inside_of_blocks():
    assert heuristic_config(16384, 2048, 2048, 256) == Config(256, 128, raster_width=4)
    assert heuristic_config(16384, 4096, 4096, 512) == Config(256, 192)  # 2048 columns are no multiple of it
    assert heuristic_config(16384, 4096, 4096, 384) == Config(128, 256)
    assert heuristic_config(16384, 4096, 4096, 192) == Config(64, 256)


def test_refuses_small_blocks():
    a = random_venom(64, 64, 32, 16, jnp.bfloat16, seed=0)
    with pytest.raises(NotImplementedError, match="multiple of 64"):
        hopper.matmul_venom(a, random((64, 64), jnp.bfloat16, seed=1))
