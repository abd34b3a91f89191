"""Heuristics of the products at shapes that no one tuned them for, and the order of the scattered product's tiles."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper
from sparse_lm.ops.hopper.products import (
    matmul_24,
    matmul_venom,
    sampled_matmul_24,
    sampled_rows_24,
    scattered_matmul_24,
)
from tests.ops.operands import random, random_24


def test_matmul_24_counts_waves():
    large, small = (config for config, _ in matmul_24.CANDIDATES)
    assert matmul_24.heuristic_config(8192, 8192, 8192) == large
    assert matmul_24.heuristic_config(128, 256 * 132, 64) == small  # one wave of 132 tiles, all of them needed


def test_matmul_venom_counts_waves_of_tiles_inside_of_blocks():
    config, choose = matmul_venom.Config, matmul_venom.heuristic_config
    assert choose(16384, 2048, 2048, 256) == config(256, 128, raster_width=4)
    assert choose(16384, 4096, 4096, 512) == config(256, 192)  # 2048 columns are no multiple of it
    assert choose(16384, 4096, 4096, 384) == config(128, 256)
    assert choose(16384, 4096, 4096, 192) == config(64, 256)
    for v in (128, 256):
        assert choose(16384, 4096, 4096, v, in_boxes=True).cluster_m == v


def test_sampled_products_keep_tiles_inside_of_blocks():
    config, choose = sampled_matmul_24.Config, sampled_matmul_24.heuristic_config
    assert choose(16384, 2048, 2048, 384) == config(256, 192)
    assert choose(16384, 2048, 2048, 128) == config(256, 128)
    with pytest.raises(NotImplementedError, match="multiple of 128 or 192"):
        choose(64, 64, 64, 64)
    for v in (64, 128, 192, 256, 384, 512):
        assert v % sampled_rows_24.heuristic_config(v).tokens == 0


def test_scattered_matmul_24_lets_clusters_share_what_a_slice_allows_and_counts_columns():
    config, choose = scattered_matmul_24.Config, scattered_matmul_24.heuristic_config
    assert choose(contiguous=512, listings=4, n=4096) == config(256, 192)
    assert choose(contiguous=512, listings=4, n=2048) == config(256, 192, raster_width=11)
    assert choose(contiguous=2048, listings=1, n=2048) == config(256, 192, raster_width=11)
    # A sixth tile of 384 columns would be mostly empty.
    assert choose(contiguous=256, listings=8, n=2048) == config(128, 256, raster_width=8)
    assert choose(contiguous=256, listings=16, n=4096) == config(256, 192, share_b=False)
    assert choose(contiguous=128, listings=32, n=4096) == config(128, 256, share_b=False, raster_width=2)


@pytest.mark.parametrize("grid, raster_width", [((5, 7), 3), ((4, 6), 2), ((3, 4), 9), ((6, 5), 1), ((1, 1), 3)])
def test_scattered_tiles_come_in_bands_row_by_row(grid, raster_width):
    height, width = grid
    bands = [range(first, min(first + raster_width, width)) for first in range(0, width, raster_width)]
    expected = [(row, column) for band in bands for row in range(height) for column in band]
    rows, columns = scattered_matmul_24.tile_at(jnp.arange(height * width, dtype=jnp.int32), grid, raster_width)
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == expected
    of_rows = np.random.default_rng(0).permutation(height)
    by_tile = scattered_matmul_24.by_tile(jnp.asarray(of_rows), grid, raster_width)
    assert by_tile.tolist() == [of_rows[row] for row, _ in expected]


@pytest.mark.parametrize(
    "tokens, contiguous, message", [(128, 64, "multiple of 128"), (64, 128, "more than 64 columns")]
)
def test_scattered_matmul_24_refuses_slices_and_tokens_that_no_tile_fits(tokens, contiguous, message):
    a, b = random_24(128, tokens, jnp.bfloat16, seed=0), random((tokens, 64), jnp.bfloat16, seed=1)
    neuron_ids = jnp.arange(128)[None].repeat(tokens // 64, axis=0)
    with pytest.raises(NotImplementedError, match=message):
        hopper.scattered_matmul_24(a, b, neuron_ids, 64, 256, contiguous=contiguous)
