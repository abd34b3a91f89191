import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper
from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.hopper import split_k
from sparse_lm.ops.hopper.matmul_24 import Config, heuristic_config
from tests.ops.hopper.operands import (
    PAIRS,
    assert_as_good_as_reference,
    assert_repeats,
    random,
    random_24,
)

LARGE, SMALL = Config(tile_m=256, tile_n=192), Config(tile_m=128, tile_n=256)
ORIENTATIONS = [(False, False), (True, False), (False, True), (True, True)]


def _product(w, b, *, b_transposed, out_transposed, out_dtype=None, config=None):
    """The kernel's w @ b, with b and the result turned around where the kernel takes or gives them so."""
    b = b.T if b_transposed else b
    options = dict(b_transposed=b_transposed, out_transposed=out_transposed, out_dtype=out_dtype, config=config)
    out = assert_repeats(lambda w, b: hopper.matmul_24(w, b, **options), w, b)
    return out.T if out_transposed else out


def _exact(w, b):
    return np.asarray(w.to_dense(), np.float64) @ np.asarray(b, np.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [LARGE, SMALL, Config(128, 128, stages=6, cluster=1, raster_along_m=False)])
@pytest.mark.parametrize("b_transposed, out_transposed", ORIENTATIONS)
@pytest.mark.parametrize("m, k, n", [(512, 320, 768), (300, 333, 1001), (64, 64, 64), (1000, 2000, 200), (1, 4, 1)])
def test_matches_reference(m, k, n, b_transposed, out_transposed, config):
    w, b = random_24(m, k, jnp.bfloat16, seed=0), random((k, n), jnp.bfloat16, seed=1)
    out = _product(w, b, b_transposed=b_transposed, out_transposed=out_transposed, config=config)
    assert_as_good_as_reference(out, w.to_dense() @ b, _exact(w, b))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, out_dtype", [(jnp.float16, None), (jnp.bfloat16, jnp.float32), (jnp.float16, jnp.bfloat16)]
)
@pytest.mark.parametrize("b_transposed, out_transposed", ORIENTATIONS)
def test_dtypes(dtype, out_dtype, b_transposed, out_transposed):
    w, b = random_24(200, 500, dtype, seed=2, scale=0.1), random((500, 392), dtype, seed=3, scale=10.0)
    out = _product(w, b, b_transposed=b_transposed, out_transposed=out_transposed, out_dtype=out_dtype)
    reference = jnp.matmul(w.to_dense(), b, preferred_element_type=jnp.float32).astype(out_dtype or dtype)
    assert_as_good_as_reference(out, reference, _exact(w, b))


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [[(0, 1)], [(2, 3)], [(0, 3)], [(0, 1), (2, 3)], PAIRS])
def test_every_pattern_of_positions(pairs):
    w, b = random_24(256, 256, jnp.bfloat16, seed=4, pairs=pairs), random((256, 256), jnp.bfloat16, seed=5)
    out = _product(w, b, b_transposed=False, out_transposed=False)
    assert_as_good_as_reference(out, w.to_dense() @ b, _exact(w, b))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_reach_the_rows_that_read_them_and_no_other(bad):
    w, b = random_24(192, 256, jnp.bfloat16, seed=6), random((256, 192), jnp.bfloat16, seed=7)
    row, column = 101, 17
    out = hopper.matmul_24(w, b.at[row, column].set(bad))
    reads_it = np.asarray(w.mask())[:, row]
    assert 0 < reads_it.sum() < 192
    np.testing.assert_array_equal(~np.isfinite(out[:, column]), reads_it)
    assert np.isfinite(np.delete(np.asarray(out, np.float32), column, axis=1)).all()

    out = hopper.matmul_24(Sparse24(w.values.at[50, 3].set(bad), w.metadata, w.shape), b)
    assert not np.isfinite(out[50]).any()
    assert np.isfinite(np.delete(np.asarray(out, np.float32), 50, axis=0)).all()


@pytest.mark.gpu
def test_schedules_agree_bit_for_bit():
    """Unsplit, the order of summation is that of k, whatever the tiling: a race would show as a difference."""
    w, b = random_24(2048, 2048, jnp.bfloat16, seed=8), random((2048, 2048), jnp.bfloat16, seed=9)
    others = [Config(128, 192, stages=3), Config(256, 128, cluster=1), Config(128, 64, stages=7, cluster=4)]
    configs = [dataclasses.replace(config, split_tail=False) for config in (LARGE, SMALL, *others)]
    results = [jax.jit(lambda w, b, c=c: hopper.matmul_24(w, b, config=c))(w, b) for c in configs for _ in range(5)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("dtype, b_dtype, out_dtype", [(jnp.float32,) * 3, (jnp.bfloat16, jnp.float16, None)])
def test_refuses_dtypes(dtype, b_dtype, out_dtype):
    with pytest.raises(NotImplementedError, match="bfloat16"):
        hopper.matmul_24(random_24(64, 64, dtype, seed=0), random((64, 64), b_dtype, seed=1), out_dtype=out_dtype)


def test_heuristic_counts_waves():
    assert heuristic_config(8192, 8192, 8192) == LARGE
    assert heuristic_config(128, 256 * 132, 64) == SMALL  # one wave of 132 tiles, all of them needed


@pytest.mark.gpu
@pytest.mark.parametrize("config", [LARGE, SMALL])
@pytest.mark.parametrize("m, k, n", [(256, 4096, 192), (300, 1100, 1001), (2048, 1536, 16384), (1024, 4096, 1024)])
def test_tiles_split_along_k(m, k, n, config):
    w, b = random_24(m, k, jnp.bfloat16, seed=10), random((k, n), jnp.bfloat16, seed=11)
    out = _product(w, b, b_transposed=False, out_transposed=True, config=config)
    reference = jnp.matmul(w.to_dense(), b, preferred_element_type=jnp.float32)
    assert_as_good_as_reference(out, reference.astype(jnp.bfloat16), reference)


def test_plan_covers_every_step_once():
    for tiles, clusters, steps in [(344, 66, 128), (352, 66, 128), (688, 66, 128), (5, 66, 17), (66, 66, 8)]:
        plan = split_k.plan(tiles, clusters, steps, split=True)
        assert plan.waves * clusters + plan.tail_tiles == tiles
        assert (plan.parts - 1) * plan.part_steps < steps <= plan.parts * plan.part_steps
        assert plan.tail_tiles * plan.parts <= plan.clusters <= clusters
        assert split_k.plan(tiles, clusters, steps, split=False).parts == 1
