"""Of `scattered_matmul_24`, which may also take a tiling, `config`."""

import jax.numpy as jnp
import numpy as np

from sparse_lm.ops import reference
from tests.ops.operands import assert_as_good_as_reference, assert_repeats, random, random_24, random_contiguous


def check(scattered_matmul_24, a, b, columns, v, rows, contiguous, *, out_dtype=None, config=None):
    def product(a, b, columns):
        return scattered_matmul_24(a, b, columns, v, rows, contiguous=contiguous, out_dtype=out_dtype, config=config)

    out = assert_repeats(product, a, b, columns)
    expected = reference.scattered_matmul_24(
        a, b, columns, v, rows, contiguous=contiguous, out_dtype=out_dtype or b.dtype
    )
    assert_as_good_as_reference(out, expected, _exact(a, b, columns, v, rows))
    unlisted = np.setdiff1d(np.arange(rows), np.asarray(columns))
    assert not np.asarray(out)[unlisted].any()


def _exact(a, b, columns, v, rows):
    dense, b = np.asarray(a.to_dense(), np.float64), np.asarray(b, np.float64)
    exact = np.zeros((rows + a.shape[0], b.shape[1]))  # runs past the last row are at the end
    for block, listed in enumerate(np.asarray(columns)):
        tokens = slice(block * v, min((block + 1) * v, len(b)))
        exact[listed] += dense[:, tokens] @ b[tokens]
    return exact[:rows]


def check_shape(scattered_matmul_24, tokens, n, kept, rows, v, contiguous, config):
    a, b = random_24(kept, tokens, jnp.bfloat16, seed=0), random((tokens, n), jnp.bfloat16, seed=1)
    columns = random_contiguous(-(-tokens // v), kept, contiguous, rows, seed=2)
    check(scattered_matmul_24, a, b, columns, v, rows, contiguous, config=config)


def check_dtypes(scattered_matmul_24, dtype, out_dtype, config=None):
    a, b = random_24(512, 3000, dtype, seed=6, scale=0.1), random((3000, 520), dtype, seed=7)
    columns = random_contiguous(12, 512, 256, 1024, seed=8)
    check(scattered_matmul_24, a, b, columns, 256, 1024, 256, out_dtype=out_dtype, config=config)


def check_bad_numbers(scattered_matmul_24, bad, token):
    """They reach the rows that their block lists and no other."""
    a, b = random_24(256, 512, jnp.bfloat16, seed=9), random((512, 512), jnp.bfloat16, seed=10)
    columns = jnp.stack([jnp.arange(256), jnp.arange(512, 768)])
    column = 7
    out = scattered_matmul_24(a, b.at[token, column].set(bad), columns, 256, 1024, contiguous=256)
    expected = np.zeros((1024, 512), bool)
    expected[512:768, column] = np.asarray(a.mask())[:, token]
    np.testing.assert_array_equal(~np.isfinite(out), expected)
