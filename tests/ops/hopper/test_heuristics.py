"""Heuristics of the products at several shapes, and the order of the scattered product's tiles."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops.hopper.products import (
    matmul_24,
    matmul_venom,
    sampled_matmul_24,
    scattered_matmul_24,
)


def test_tiles_lie_inside_of_blocks_and_slices():
    for v in (64, 128, 192, 256, 384, 512):
        assert v % matmul_venom.heuristic_config(16384, 4096, 4096, v).cluster_m == 0
        if v > 64:
            assert v % sampled_matmul_24.heuristic_config(16384, 2048, 2048, v).tile_n == 0
    for v in (128, 256, 512):
        assert v % matmul_venom.heuristic_config(16384, 4096, 4096, v, in_boxes=True).cluster_m == 0
        for listings in (1, 8, 32):
            chosen = scattered_matmul_24.heuristic_config(contiguous=v, listings=listings, n=4096)
            assert v % chosen.cluster_m == 0


def test_tiles_leave_few_cores_idle():
    large, small = (config for config, _ in matmul_24.CANDIDATES)
    assert matmul_24.heuristic_config(8192, 8192, 8192) == large
    assert matmul_24.heuristic_config(128, 256 * 132, 64) == small  # one wave of 132 tiles, all of them needed
    # 2048 columns are no multiple of 192, and a sixth tile of 384 would be mostly empty.
    for n, venom, scattered in ((2048, 128, 256), (4096, 192, 192)):
        assert matmul_venom.heuristic_config(16384, n, n, 256).tile_n == venom
        assert scattered_matmul_24.heuristic_config(contiguous=256, listings=8, n=n).tile_n == scattered


@pytest.mark.parametrize("grid, raster_width", [((5, 7), 3), ((3, 4), 9), ((6, 5), 1)])
def test_scattered_tiles_come_in_bands_row_by_row(grid, raster_width):
    height, width = grid
    bands = [range(first, min(first + raster_width, width)) for first in range(0, width, raster_width)]
    expected = [(row, column) for band in bands for row in range(height) for column in band]
    rows, columns = scattered_matmul_24.tile_at(jnp.arange(height * width, dtype=jnp.int32), grid, raster_width)
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == expected
    of_rows = np.random.default_rng(0).permutation(height)
    by_tile = scattered_matmul_24.by_tile(jnp.asarray(of_rows), grid, raster_width)
    assert by_tile.tolist() == [of_rows[row] for row, _ in expected]
