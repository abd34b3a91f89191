import functools

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.hopper.frame.tiling import Tiling
from tests.ops.kernels import BACKENDS, each_backend, each_tiling, tilings
from tests.ops.operands import assert_agree, assert_as_good_as_reference, assert_repeats, random, random_24

EXTRA = dict(hopper=[Tiling(128, 128)])


def check(matmul_24, w, b, *, out_transposed=False, out_dtype=None, config=None):
    options = dict(out_transposed=out_transposed, out_dtype=out_dtype, config=config)
    out = assert_repeats(lambda w, b: matmul_24(w, b, **options), w, b)
    reference = jnp.matmul(w.to_dense(), b, preferred_element_type=jnp.float32).astype(out_dtype or b.dtype)
    exact = np.asarray(w.to_dense(), np.float64) @ np.asarray(b, np.float64)
    assert_as_good_as_reference(out.T if out_transposed else out, reference, exact)


@pytest.mark.gpu
@each_tiling("matmul_24", **EXTRA)
@pytest.mark.parametrize("out_transposed", [False, True])
@pytest.mark.parametrize(
    "m, k, n",
    [
        *[(512, 320, 768), (300, 333, 1001), (64, 64, 64), (1000, 2000, 200), (1, 4, 1)],
        *[(256, 4096, 192), (300, 1100, 1001), (2048, 1536, 16384), (1024, 4096, 1024)],  # which Hopper splits along k
    ],
)
def test_matches_reference(m, k, n, out_transposed, backend, config):
    w, b = random_24(m, k, jnp.bfloat16, seed=0), random((k, n), jnp.bfloat16, seed=1)
    check(backend.matmul_24, w, b, out_transposed=out_transposed, config=config)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize(
    "dtype, out_dtype", [(jnp.float16, None), (jnp.bfloat16, jnp.float32), (jnp.float16, jnp.bfloat16)]
)
@pytest.mark.parametrize("out_transposed", [False, True])
def test_dtypes(dtype, out_dtype, out_transposed, backend):
    w, b = random_24(200, 500, dtype, seed=2, scale=0.1), random((500, 392), dtype, seed=3, scale=10.0)
    check(backend.matmul_24, w, b, out_dtype=out_dtype, out_transposed=out_transposed)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_reach_the_rows_that_read_them_and_no_other(bad, backend):
    w, b = random_24(192, 256, jnp.bfloat16, seed=6), random((256, 192), jnp.bfloat16, seed=7)
    row, column = 101, 17
    out = backend.matmul_24(w, b.at[row, column].set(bad))
    reads_it = np.asarray(w.mask())[:, row]
    assert 0 < reads_it.sum() < 192
    np.testing.assert_array_equal(~np.isfinite(out[:, column]), reads_it)
    assert np.isfinite(np.delete(np.asarray(out, np.float32), column, axis=1)).all()

    out = backend.matmul_24(Sparse24(w.values.at[50, 3].set(bad), w.metadata, w.shape), b)
    assert not np.isfinite(out[50]).any()
    assert np.isfinite(np.delete(np.asarray(out, np.float32), 50, axis=0)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_tilings_agree_bit_for_bit(name):
    """Of few columns no sum is split: its order is that of k, whatever the tiling, and a race would be a difference."""
    configs = tilings("matmul_24", hopper=[Tiling(128, 192), Tiling(256, 128), Tiling(128, 64)])[name]
    w, b = random_24(2048, 960, jnp.bfloat16, seed=8), random((960, 2048), jnp.bfloat16, seed=9)
    assert_agree([functools.partial(BACKENDS[name].matmul_24, config=config) for config in configs], w, b)
