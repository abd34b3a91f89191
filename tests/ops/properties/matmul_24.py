"""Of `matmul_24`, which may also take a tiling, `config`."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops.formats import Sparse24
from tests.ops.operands import assert_as_good_as_reference, assert_repeats, random, random_24


def check(matmul_24, w, b, *, out_transposed=False, out_dtype=None, config=None):
    options = dict(out_transposed=out_transposed, out_dtype=out_dtype, config=config)
    out = assert_repeats(lambda w, b: matmul_24(w, b, **options), w, b)
    reference = jnp.matmul(w.to_dense(), b, preferred_element_type=jnp.float32).astype(out_dtype or b.dtype)
    exact = np.asarray(w.to_dense(), np.float64) @ np.asarray(b, np.float64)
    assert_as_good_as_reference(out.T if out_transposed else out, reference, exact)


def check_shape(matmul_24, m, k, n, **options):
    check(matmul_24, random_24(m, k, jnp.bfloat16, seed=0), random((k, n), jnp.bfloat16, seed=1), **options)


def check_dtypes(matmul_24, dtype, out_dtype, **options):
    w, b = random_24(200, 500, dtype, seed=2, scale=0.1), random((500, 392), dtype, seed=3, scale=10.0)
    check(matmul_24, w, b, out_dtype=out_dtype, **options)


def check_positions(matmul_24, pairs):
    w, b = random_24(256, 256, jnp.bfloat16, seed=4, pairs=pairs), random((256, 256), jnp.bfloat16, seed=5)
    check(matmul_24, w, b)


def check_bad_numbers(matmul_24, bad):
    """They reach the rows that read them and no other."""
    w, b = random_24(192, 256, jnp.bfloat16, seed=6), random((256, 192), jnp.bfloat16, seed=7)
    row, column = 101, 17
    out = matmul_24(w, b.at[row, column].set(bad))
    reads_it = np.asarray(w.mask())[:, row]
    assert 0 < reads_it.sum() < 192
    np.testing.assert_array_equal(~np.isfinite(out[:, column]), reads_it)
    assert np.isfinite(np.delete(np.asarray(out, np.float32), column, axis=1)).all()

    out = matmul_24(Sparse24(w.values.at[50, 3].set(bad), w.metadata, w.shape), b)
    assert not np.isfinite(out[50]).any()
    assert np.isfinite(np.delete(np.asarray(out, np.float32), 50, axis=0)).all()


def check_refuses_dtypes(matmul_24, dtype, b_dtype, out_dtype):
    with pytest.raises(NotImplementedError, match="bfloat16"):
        matmul_24(random_24(64, 64, dtype, seed=0), random((64, 64), b_dtype, seed=1), out_dtype=out_dtype)
