import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import reference, triton
from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.triton.sampled_matmul_24 import CANDIDATES
from tests.ops.hopper.operands import assert_as_good_as_reference, assert_repeats, random, random_24


def _random_columns(tokens, v, kept, neurons, seed):
    """Distinct neurons of each block in any order; `neurons`, a row of zeros, among them."""
    rng = np.random.default_rng(seed)
    return jnp.asarray([rng.permutation(neurons + 1)[:kept] for _ in range(-(-tokens // v))], jnp.int32)


def _exact(w, x, columns, v):
    dense = np.pad(np.asarray(w.to_dense(), np.float64), ((0, 1), (0, 0)))
    return np.stack([dense[columns[t // v]] @ row for t, row in enumerate(np.asarray(x, np.float64))])


@pytest.mark.gpu
@pytest.mark.parametrize("config", CANDIDATES)
@pytest.mark.parametrize(
    "tokens, dim, neurons, kept, blocks_of_tile",
    [(768, 512, 1024, 512, 1), (1000, 333, 1280, 601, 2), (300, 64, 500, 500, 1), (1, 100, 64, 8, 1)],
)
def test_matches_reference(tokens, dim, neurons, kept, blocks_of_tile, config):
    v = blocks_of_tile * config.tile_n
    w, x = random_24(neurons, dim, jnp.bfloat16, seed=0), random((tokens, dim), jnp.bfloat16, seed=1)
    columns = _random_columns(tokens, v, kept, neurons, seed=2)
    out = assert_repeats(lambda *args: triton.sampled_matmul_24(*args, v, config=config), w, x, columns)
    expected = reference.sampled_matmul_24(w, x, columns, v, out_dtype=jnp.bfloat16)
    assert_as_good_as_reference(out, expected, _exact(w, x, np.asarray(columns), v))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)])
@pytest.mark.parametrize("v", [64, 128])
@pytest.mark.parametrize("run", [1, 32])
def test_dtypes(dtype, out_dtype, v, run):
    w, x = random_24(512, 256, dtype, seed=3, scale=0.1), random((700, 256), dtype, seed=4)
    runs = _random_columns(700, v, 256 // run, 512 // run - 1, seed=5)
    columns = (runs[..., None] * run + jnp.arange(run)).reshape(runs.shape[0], -1)
    out = assert_repeats(lambda *args: triton.sampled_matmul_24(*args, v, run=run, out_dtype=out_dtype), w, x, columns)
    expected = reference.sampled_matmul_24(w, x, columns, v, out_dtype=out_dtype)
    assert_as_good_as_reference(out, expected, _exact(w, x, np.asarray(columns), v))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_reach_the_blocks_that_list_them_and_no_other(bad):
    w, x = random_24(512, 256, jnp.bfloat16, seed=6), random((128, 256), jnp.bfloat16, seed=7)
    columns = jnp.stack([jnp.arange(1, 256, 2), jnp.arange(511, 256, -2)])
    values = w.values.at[:512:2].set(bad).at[401, 5].set(bad)
    out = triton.sampled_matmul_24(Sparse24(values, w.metadata, w.shape), x, columns, 64)
    bad_column = (511 - 401) // 2
    assert np.isfinite(out[:64]).all() and not np.isfinite(out[64:, bad_column]).any()
    assert np.isfinite(np.delete(np.asarray(out, np.float32)[64:], bad_column, axis=1)).all()


@pytest.mark.gpu
def test_tilings_agree_bit_for_bit():
    w, x = random_24(4096, 1024, jnp.bfloat16, seed=8), random((4096, 1024), jnp.bfloat16, seed=9)
    columns = _random_columns(4096, 128, 1024, 4096, seed=10)
    products = [lambda *args, c=config: triton.sampled_matmul_24(*args, 128, config=c) for config in CANDIDATES]
    results = [jax.jit(product)(w, x, columns) for product in products for _ in range(5)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_refuses_small_blocks():
    w, x = random_24(64, 64, jnp.bfloat16, seed=0), random((64, 64), jnp.bfloat16, seed=1)
    with pytest.raises(NotImplementedError, match="multiple of 64"):
        triton.sampled_matmul_24(w, x, _random_columns(64, 32, 16, 64, seed=2), 32)
