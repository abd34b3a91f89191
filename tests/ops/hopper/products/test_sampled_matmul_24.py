import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper
from sparse_lm.ops.hopper.products.sampled_matmul_24 import CANDIDATES, Config, heuristic_config
from tests.ops.operands import (
    assert_repeats,
    random,
    random_24,
    random_contiguous,
)
from tests.ops.properties import sampled_matmul_24 as properties

CONFIGS = [config for config, _ in CANDIDATES]
SHAPES = [  # tokens, dim, neurons, kept, contiguous
    (768, 512, 1024, 512, 512),
    (1000, 333, 1280, 640, 128),
    (300, 64, 768, 192, 64),
    (1, 100, 256, 64, 64),
    (1536, 1024, 4096, 1024, 256),
    (1153, 2048, 1152, 1152, 192),
]


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("tokens, dim, neurons, kept, contiguous", SHAPES)
def test_matches_reference(tokens, dim, neurons, kept, contiguous, config):
    v = 384 if tokens == 768 else config.tile_n
    w, x = random_24(neurons, dim, jnp.bfloat16, seed=0), random((tokens, dim), jnp.bfloat16, seed=1)
    if v % config.tile_n:
        v = 2 * config.tile_n
    columns = random_contiguous(-(-tokens // v), kept, contiguous, neurons, seed=2)
    properties.check(hopper.sampled_matmul_24, w, x, columns, v, contiguous=contiguous, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)])
@pytest.mark.parametrize("v", [128, 192, 256])
def test_dtypes(dtype, out_dtype, v):
    w, x = random_24(512, 256, dtype, seed=3, scale=0.1), random((700, 256), dtype, seed=4)
    columns = random_contiguous(-(-700 // v), 256, 128, 512, seed=5)
    properties.check(hopper.sampled_matmul_24, w, x, columns, v, contiguous=128, out_dtype=out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("config", CONFIGS)
def test_bad_numbers_reach_the_blocks_that_list_them_and_no_other(bad, config):
    v = config.tile_n
    w, x = random_24(512, 256, jnp.bfloat16, seed=6), random((2 * v, 256), jnp.bfloat16, seed=7)
    columns = jnp.stack([jnp.arange(128, 256), jnp.arange(384, 512)])
    values = w.values.at[:128].set(bad).at[256:384].set(bad).at[400, 5].set(bad)
    w = type(w)(values, w.metadata, w.shape)
    out = hopper.sampled_matmul_24(w, x, columns, v, contiguous=128, config=config)
    assert np.isfinite(np.delete(np.asarray(out, np.float32)[v:], 16, axis=1)).all()
    assert np.isfinite(out[:v]).all() and not np.isfinite(out[v:, 16]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dim", [512, 320])  # an even and an odd number of steps
def test_blocks_that_list_nothing_are_zeros(dim, config):
    v, contiguous, neurons = 2 * config.tile_n, 128, 1024
    w, x = random_24(neurons, dim, jnp.bfloat16, seed=8), random((9 * v, dim), jnp.bfloat16, seed=9)
    columns = random_contiguous(9, 512, contiguous, neurons, seed=10)
    nothing = jnp.array([2, 6, 7, 8])
    product = lambda columns: hopper.sampled_matmul_24(w, x, columns, v, contiguous=contiguous, config=config)  # noqa: E731
    expected = product(columns).reshape(9, v, 512).at[nothing].set(0).reshape(9 * v, 512)
    np.testing.assert_array_equal(assert_repeats(product, columns.at[nothing].set(neurons)), expected)
    assert not assert_repeats(product, jnp.full_like(columns, neurons)).any()


def test_no_tile_fits_small_blocks():
    with pytest.raises(NotImplementedError, match="multiple of 128 or 192"):
        heuristic_config(64, 64, 64, 64)


def test_heuristic_keeps_tiles_inside_of_blocks():
    assert heuristic_config(16384, 2048, 2048, 384) == Config(256, 192)
    assert heuristic_config(16384, 2048, 2048, 128) == Config(256, 128)
