import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper
from sparse_lm.ops.hopper.products.scattered_matmul_24 import Config, by_tile, heuristic_config, tile_at
from tests.ops.operands import random, random_24, random_contiguous
from tests.ops.properties import scattered_matmul_24 as properties

UNDER, BESIDE = Config(128, 256), Config(128, 256, share_b=False, raster_width=2)
TALL = Config(256, 192, share_b=False)
CONFIGS = [UNDER, BESIDE, TALL, Config(128, 128, cluster=1, stages=6, store_slots=3, raster_width=4)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens, n, kept, rows, v, contiguous",
    [
        (2048, 512, 512, 2048, 256, 512),
        (1000, 200, 256, 1024, 192, 256),
        (900, 1001, 768, 1536, 64, 256),
        (100, 64, 256, 256, 128, 256),
        (16384, 768, 1024, 4096, 256, 256),
    ],
)
@pytest.mark.parametrize("config", CONFIGS)
def test_matches_reference(tokens, n, kept, rows, v, contiguous, config):
    properties.check_shape(hopper.scattered_matmul_24, tokens, n, kept, rows, v, contiguous, config)


@pytest.mark.gpu
@pytest.mark.parametrize("clusters", [1, 16])
def test_uneven_work(clusters):
    """Runs of 128 that one block lists, or all of them, or none."""
    a, b = random_24(512, 4096, jnp.bfloat16, seed=3), random((4096, 512), jnp.bfloat16, seed=4)
    columns = random_contiguous(32, 512, 128, 8192, seed=5, lists=clusters).at[:, :128].set(jnp.arange(128))
    properties.check(hopper.scattered_matmul_24, a, b, columns, 128, 8192, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)])
@pytest.mark.parametrize("config", CONFIGS)
def test_dtypes(dtype, out_dtype, config):
    properties.check_dtypes(hopper.scattered_matmul_24, dtype, out_dtype, config)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_reach_the_rows_that_their_block_lists_and_no_other(bad):
    properties.check_bad_numbers(hopper.scattered_matmul_24, bad, token=300)


@pytest.mark.gpu
def test_no_sum_is_lost_when_repeated():
    """A race between the parts of a tile would show as a difference now and then."""
    a, b = random_24(512, 8192, jnp.bfloat16, seed=11), random((8192, 1024), jnp.bfloat16, seed=12)
    columns = random_contiguous(64, 512, 128, 2048, seed=13)
    product = jax.jit(
        lambda: hopper.scattered_matmul_24(a, b, columns, 128, 2048, contiguous=128, out_dtype=jnp.float32)
    )
    first = product()
    for _ in range(20):
        np.testing.assert_array_equal(product(), first)


@pytest.mark.parametrize(
    "tokens, v, rows, contiguous, message",
    [
        (128, 64, 256, 64, "multiple of 128"),
        (128, 96, 256, 128, "v to be a multiple of 64"),
        (128, 64, 200, 128, "divide the 200 rows"),
        (64, 64, 256, 128, "more than 64 columns"),
    ],
)
def test_refuses(tokens, v, rows, contiguous, message):
    a, b = random_24(128, tokens, jnp.bfloat16, seed=0), random((tokens, 64), jnp.bfloat16, seed=1)
    columns = jnp.arange(128)[None].repeat(-(-tokens // v), axis=0)
    with pytest.raises(NotImplementedError, match=message):
        hopper.scattered_matmul_24(a, b, columns, v, rows, contiguous=contiguous)


def test_heuristic_lets_clusters_share_what_the_run_allows_and_counts_columns():
    assert heuristic_config(contiguous=512, listings=4, n=4096) == Config(256, 192)
    assert heuristic_config(contiguous=512, listings=4, n=2048) == Config(256, 192, raster_width=11)
    assert heuristic_config(contiguous=2048, listings=1, n=2048) == Config(256, 192, raster_width=11)
    # A sixth tile of 384 columns would be mostly empty.
    assert heuristic_config(contiguous=256, listings=8, n=2048) == Config(128, 256, raster_width=8)
    assert heuristic_config(contiguous=256, listings=16, n=4096) == TALL
    assert heuristic_config(contiguous=128, listings=32, n=4096) == BESIDE


@pytest.mark.parametrize("grid, raster_width", [((5, 7), 3), ((4, 6), 2), ((3, 4), 9), ((6, 5), 1), ((1, 1), 3)])
def test_tiles_come_in_bands_row_by_row(grid, raster_width):
    height, width = grid
    bands = [range(first, min(first + raster_width, width)) for first in range(0, width, raster_width)]
    expected = [(row, column) for band in bands for row in range(height) for column in band]
    rows, columns = tile_at(jnp.arange(height * width, dtype=jnp.int32), grid, raster_width)
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == expected
    of_rows = np.random.default_rng(0).permutation(height)
    assert by_tile(jnp.asarray(of_rows), grid, raster_width).tolist() == [of_rows[row] for row, _ in expected]
