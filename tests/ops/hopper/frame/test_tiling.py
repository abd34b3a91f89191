import numpy as np
import pytest

from sparse_lm.ops.hopper.frame.tiling import CONSUMERS, Tiling


@pytest.mark.parametrize("share_b", [False, True])
@pytest.mark.parametrize("sizes", [(256, 192), (128, 256), (64, 128)])
@pytest.mark.parametrize("cluster", [1, 2])
def test_tiles_of_all_blocks_cover_the_product_once(cluster, sizes, share_b):
    tiling = Tiling(*sizes, cluster=cluster, share_b=share_b)
    rows, columns = tiling.grid(700, 1000)
    covered = np.zeros((rows * tiling.cluster_m, columns * tiling.cluster_n), int)
    for row, column, peer in np.ndindex(rows, columns, cluster):
        m, n = tiling.origin(row, column, peer)
        covered[m : m + tiling.tile_m, n : n + tiling.tile_n] += 1
    assert (covered == 1).all()
    assert covered.shape[0] >= 700 > covered.shape[0] - tiling.cluster_m
    assert covered.shape[1] >= 1000 > covered.shape[1] - tiling.cluster_n


@pytest.mark.parametrize("sizes", [(256, 192), (128, 256), (64, 128)])
def test_consumers_share_a_tile_evenly(sizes):
    assert CONSUMERS * np.prod(Tiling(*sizes).consumer_tile) == np.prod(sizes)
