import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import reference, triton
from sparse_lm.ops.triton.matmul_24 import CANDIDATES
from tests.ops.hopper.operands import assert_as_good_as_reference, assert_repeats, random, random_24, random_runs


def _exact(a, b, columns, v, rows):
    dense, b = np.asarray(a.to_dense(), np.float64), np.asarray(b, np.float64)
    exact = np.zeros((rows + a.shape[0], b.shape[1]))  # runs past the last row are at the end
    for block, listed in enumerate(np.asarray(columns)):
        tokens = slice(block * v, min((block + 1) * v, len(b)))
        exact[listed] += dense[:, tokens] @ b[tokens]
    return exact[:rows]


def _check(a, b, columns, v, rows, run, *, out_dtype=None, config=None):
    def product(a, b, columns):
        return triton.scattered_matmul_24(a, b, columns, v, rows, run=run, out_dtype=out_dtype, config=config)

    out = assert_repeats(product, a, b, columns)
    expected = reference.scattered_matmul_24(a, b, columns, v, rows, run=run, out_dtype=out_dtype or b.dtype)
    assert_as_good_as_reference(out, expected, _exact(a, b, columns, v, rows))
    unlisted = np.setdiff1d(np.arange(rows), np.asarray(columns))
    assert not np.asarray(out)[unlisted].any()


@pytest.mark.gpu
@pytest.mark.parametrize("config", CANDIDATES)
@pytest.mark.parametrize(
    "tokens, n, kept, rows, v, run",
    [(2048, 512, 512, 2048, 256, 512), (1000, 200, 256, 1024, 192, 256), (900, 1001, 768, 1536, 64, 256)],
)
def test_matches_reference(tokens, n, kept, rows, v, run, config):
    a, b = random_24(kept, tokens, jnp.bfloat16, seed=0), random((tokens, n), jnp.bfloat16, seed=1)
    columns = random_runs(-(-tokens // v), kept, run, rows, seed=2)
    _check(a, b, columns, v, rows, run, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("run", [64, 128])
def test_runs_that_one_block_lists_or_all_or_none(run):
    a, b = random_24(512, 4096, jnp.bfloat16, seed=3), random((4096, 264), jnp.bfloat16, seed=4)
    columns = random_runs(32, 512, run, 4096 - run, seed=5, lists=32) + run
    columns = columns.at[:, :run].set(jnp.arange(run))
    columns = columns.at[7].set(4096 + jnp.arange(512))  # lists nothing that there is
    _check(a, b, columns, 128, 4096, run)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)])
def test_dtypes(dtype, out_dtype):
    a, b = random_24(512, 3000, dtype, seed=6, scale=0.1), random((3000, 520), dtype, seed=7)
    _check(a, b, random_runs(12, 512, 256, 1024, seed=8), 256, 1024, 256, out_dtype=out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_reach_the_rows_that_their_block_lists_and_no_other(bad):
    """Steps that only fill up a round read none of them."""
    a, b = random_24(256, 512, jnp.bfloat16, seed=9), random((512, 512), jnp.bfloat16, seed=10)
    columns = jnp.stack([jnp.arange(256), jnp.arange(512, 768)])
    token, column = 511, 7
    out = triton.scattered_matmul_24(a, b.at[token, column].set(bad), columns, 256, 1024, run=256)
    expected = np.zeros((1024, 512), bool)
    expected[512:768, column] = np.asarray(a.mask())[:, token]
    np.testing.assert_array_equal(~np.isfinite(out), expected)


@pytest.mark.parametrize(
    "v, rows, run, message",
    [(64, 256, 32, "multiples of 64"), (96, 256, 128, "multiples of 64"), (64, 200, 128, "divide the 200 rows")],
)
def test_refuses(v, rows, run, message):
    a, b = random_24(128, 128, jnp.bfloat16, seed=0), random((128, 64), jnp.bfloat16, seed=1)
    with pytest.raises(NotImplementedError, match=message):
        triton.scattered_matmul_24(a, b, jnp.arange(128)[None].repeat(2, axis=0), v, rows, run=run)
