import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import backends, triton
from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.triton.matmul_24 import CANDIDATES
from sparse_lm.ops.triton.product import Tiling
from tests.ops.hopper.operands import PAIRS, assert_as_good_as_reference, assert_repeats, random, random_24

ORIENTATIONS = [(False, False), (True, False), (False, True), (True, True)]


def _product(w, b, *, b_transposed, out_transposed, out_dtype=None, config=None):
    """The kernel's w @ b, with b and the result turned around where the kernel takes or gives them so."""
    b = b.T if b_transposed else b
    options = dict(b_transposed=b_transposed, out_transposed=out_transposed, out_dtype=out_dtype, config=config)
    out = assert_repeats(lambda w, b: triton.matmul_24(w, b, **options), w, b)
    return out.T if out_transposed else out


def _exact(w, b):
    return np.asarray(w.to_dense(), np.float64) @ np.asarray(b, np.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CANDIDATES)
@pytest.mark.parametrize("b_transposed, out_transposed", ORIENTATIONS)
@pytest.mark.parametrize("m, k, n", [(512, 320, 768), (300, 333, 1001), (1, 4, 1)])
def test_matches_reference(m, k, n, b_transposed, out_transposed, config):
    w, b = random_24(m, k, jnp.bfloat16, seed=0), random((k, n), jnp.bfloat16, seed=1)
    out = _product(w, b, b_transposed=b_transposed, out_transposed=out_transposed, config=config)
    assert_as_good_as_reference(out, w.to_dense() @ b, _exact(w, b))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, out_dtype", [(jnp.float16, None), (jnp.bfloat16, jnp.float32), (jnp.float16, jnp.bfloat16)]
)
@pytest.mark.parametrize("b_transposed, out_transposed", [(False, False), (True, True)])
def test_dtypes(dtype, out_dtype, b_transposed, out_transposed):
    w, b = random_24(200, 500, dtype, seed=2, scale=0.1), random((500, 392), dtype, seed=3, scale=10.0)
    out = _product(w, b, b_transposed=b_transposed, out_transposed=out_transposed, out_dtype=out_dtype)
    reference = jnp.matmul(w.to_dense(), b, preferred_element_type=jnp.float32).astype(out_dtype or dtype)
    assert_as_good_as_reference(out, reference, _exact(w, b))


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [[(0, 1)], [(2, 3)], [(0, 3)], PAIRS])
def test_every_pattern_of_positions(pairs):
    w, b = random_24(256, 256, jnp.bfloat16, seed=4, pairs=pairs), random((256, 256), jnp.bfloat16, seed=5)
    out = _product(w, b, b_transposed=False, out_transposed=False)
    assert_as_good_as_reference(out, w.to_dense() @ b, _exact(w, b))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_reach_the_rows_that_read_them_and_no_other(bad):
    w, b = random_24(192, 256, jnp.bfloat16, seed=6), random((256, 192), jnp.bfloat16, seed=7)
    row, column = 101, 17
    out = triton.matmul_24(w, b.at[row, column].set(bad))
    reads_it = np.asarray(w.mask())[:, row]
    assert 0 < reads_it.sum() < 192
    np.testing.assert_array_equal(~np.isfinite(out[:, column]), reads_it)
    assert np.isfinite(np.delete(np.asarray(out, np.float32), column, axis=1)).all()

    out = triton.matmul_24(Sparse24(w.values.at[50, 3].set(bad), w.metadata, w.shape), b)
    assert not np.isfinite(out[50]).any()
    assert np.isfinite(np.delete(np.asarray(out, np.float32), 50, axis=0)).all()


@pytest.mark.gpu
def test_tilings_agree_bit_for_bit():
    """The order of summation is that of k, whatever the tiling: a race would show as a difference."""
    w, b = random_24(2048, 2048, jnp.bfloat16, seed=8), random((2048, 2048), jnp.bfloat16, seed=9)
    results = [jax.jit(lambda w, b, c=c: triton.matmul_24(w, b, config=c))(w, b) for c in CANDIDATES for _ in range(5)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.gpu
def test_the_public_op_runs_this_backend():
    w, b = random_24(128, 128, jnp.bfloat16, seed=10), random((128, 64), jnp.bfloat16, seed=11)
    with backends.record() as used:
        out = ops.matmul_24(w, b, implementation="triton")
    assert used == {"matmul_24": {"triton"}}
    assert_as_good_as_reference(out, w.to_dense() @ b, _exact(w, b))


@pytest.mark.parametrize("dtype, b_dtype, out_dtype", [(jnp.float32,) * 3, (jnp.bfloat16, jnp.float16, None)])
def test_refuses_dtypes(dtype, b_dtype, out_dtype):
    with pytest.raises(NotImplementedError, match="bfloat16"):
        triton.matmul_24(random_24(64, 64, dtype, seed=0), random((64, 64), b_dtype, seed=1), out_dtype=out_dtype)


def test_refuses_tilings_that_do_not_fit():
    config = Tiling(256, 128, warps_m=4, warps_n=2, stages=7)
    w, b = random_24(64, 64, jnp.bfloat16, seed=0), random((64, 64), jnp.bfloat16, seed=1)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        triton.matmul_24(w, b, config=config)
