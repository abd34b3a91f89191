"""Of `sampled_matmul_24`, which may also take a tiling, `config`."""

import jax.numpy as jnp
import numpy as np

from sparse_lm.ops import reference
from sparse_lm.ops.formats import Sparse24
from tests.ops.operands import assert_as_good_as_reference, assert_repeats, random, random_24, random_columns


def check(sampled_matmul_24, w, x, columns, v, *, out_dtype=None, **options):
    options = dict(options, out_dtype=out_dtype)
    out = assert_repeats(lambda *operands: sampled_matmul_24(*operands, v, **options), w, x, columns)
    expected = reference.sampled_matmul_24(w, x, columns, v, out_dtype=out_dtype or x.dtype)
    assert_as_good_as_reference(out, expected, _exact(w, x, np.asarray(columns), v))


def _exact(w, x, columns, v):
    dense = np.pad(np.asarray(w.to_dense(), np.float64), ((0, 1), (0, 0)))
    return np.stack([dense[columns[t // v]] @ row for t, row in enumerate(np.asarray(x, np.float64))])


def check_shape(sampled_matmul_24, tokens, dim, neurons, kept, v, config):
    w, x = random_24(neurons, dim, jnp.bfloat16, seed=0), random((tokens, dim), jnp.bfloat16, seed=1)
    columns = random_columns(-(-tokens // v), kept, neurons, seed=2)
    check(sampled_matmul_24, w, x, columns, v, config=config)


def check_dtypes(sampled_matmul_24, dtype, out_dtype, v, contiguous):
    w, x = random_24(512, 256, dtype, seed=3, scale=0.1), random((700, 256), dtype, seed=4)
    runs = random_columns(-(-700 // v), 256 // contiguous, 512 // contiguous - 1, seed=5)
    columns = (runs[..., None] * contiguous + jnp.arange(contiguous)).reshape(runs.shape[0], -1)
    check(sampled_matmul_24, w, x, columns, v, contiguous=contiguous, out_dtype=out_dtype)


def check_bad_numbers(sampled_matmul_24, bad, v, config=None):
    """They reach the blocks that list them and no other."""
    w, x = random_24(512, 256, jnp.bfloat16, seed=6), random((2 * v, 256), jnp.bfloat16, seed=7)
    columns = jnp.stack([jnp.arange(1, 256, 2), jnp.arange(511, 256, -2)])
    values = w.values.at[:512:2].set(bad).at[401, 5].set(bad)
    out = sampled_matmul_24(Sparse24(values, w.metadata, w.shape), x, columns, v, config=config)
    bad_column = (511 - 401) // 2
    assert np.isfinite(out[:v]).all() and not np.isfinite(out[v:, bad_column]).any()
    assert np.isfinite(np.delete(np.asarray(out, np.float32)[v:], bad_column, axis=1)).all()
