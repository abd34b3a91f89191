"""Of `matmul_24`, which may also take a tiling, `config`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sparse_lm.ops.formats import Sparse24
from tests.ops.operands import assert_as_good_as_reference, assert_repeats, random, random_24

ORIENTATIONS = [(False, False), (True, False), (False, True), (True, True)]


def check(matmul_24, w, b, *, b_transposed=False, out_transposed=False, out_dtype=None, config=None):
    """w @ b, with b and the result turned around where the kernel takes or gives them so."""
    options = dict(b_transposed=b_transposed, out_transposed=out_transposed, out_dtype=out_dtype, config=config)
    out = assert_repeats(lambda w, b: matmul_24(w, b, **options), w, b.T if b_transposed else b)
    reference = jnp.matmul(w.to_dense(), b, preferred_element_type=jnp.float32).astype(out_dtype or b.dtype)
    exact = np.asarray(w.to_dense(), np.float64) @ np.asarray(b, np.float64)
    assert_as_good_as_reference(out.T if out_transposed else out, reference, exact)


def check_shape(matmul_24, m, k, n, **options):
    check(matmul_24, random_24(m, k, jnp.bfloat16, seed=0), random((k, n), jnp.bfloat16, seed=1), **options)


def check_dtypes(matmul_24, dtype, out_dtype, **orientation):
    w, b = random_24(200, 500, dtype, seed=2, scale=0.1), random((500, 392), dtype, seed=3, scale=10.0)
    check(matmul_24, w, b, out_dtype=out_dtype, **orientation)


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


def check_accumulates(matmul_24, m, k, n, *, b_transposed=False, out_transposed=False, config=None):
    """Into a total that is much larger; one that is not donated keeps its numbers."""
    w, b = random_24(m, k, jnp.bfloat16, seed=12), random((k, n), jnp.bfloat16, seed=13)
    total = random((n, m) if out_transposed else (m, n), jnp.float32, seed=14, scale=30.0)
    before = np.array(total)
    options = dict(b_transposed=b_transposed, out_transposed=out_transposed, out_dtype=jnp.float32, config=config)

    def accumulate(total, w, b):
        return matmul_24(w, b, total=total, **options)

    out = assert_repeats(accumulate, total, w, b.T if b_transposed else b)
    np.testing.assert_array_equal(total, before)
    product = jnp.matmul(w.to_dense(), b, preferred_element_type=jnp.float32)
    exact = np.asarray(w.to_dense(), np.float64) @ np.asarray(b, np.float64)
    if out_transposed:
        product, exact = product.T, exact.T
    assert_as_good_as_reference(out, total + product, before + exact)


def check_accumulates_like_a_sum(matmul_24, *, out_transposed=False, config=None):
    """Of a loop's products, with the bits of those that are added up outside: in a donated total, and one per layer.

    XLA hands kernels the layers' totals without copying them, and their results' places without copying those.
    """
    count, m, k, n = 3, 576, 320, 832
    w = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(random_24(m, k, jnp.bfloat16, seed=i) for i in range(count)))
    b = random((count, k, n), jnp.bfloat16, seed=20)
    totals = random((count, n, m) if out_transposed else (count, m, n), jnp.float32, seed=21)
    product = functools.partial(matmul_24, out_transposed=out_transposed, out_dtype=jnp.float32, config=config)

    def accumulate(total, w, b):
        return product(w, b, total=total)

    def in_turn(total, w, b):
        return lax.scan(lambda total, wb: (accumulate(total, *wb), None), total, (w, b))[0]

    def layers(totals, w, b):
        return lax.scan(lambda _, operands: (None, accumulate(*operands)), None, (totals, w, b))[1]

    def update_layers(totals, w, b):
        def update(i, totals):
            layer = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), (totals, w, b))
            return totals.at[i].set(accumulate(*layer))

        return lax.fori_loop(0, count, update, totals)

    products = np.asarray(jax.jit(lambda w, b: lax.map(lambda wb: product(*wb), (w, b)))(w, b))
    total, before = jnp.array(totals[0]), np.array(totals)
    expected = functools.reduce(np.add, products, before[0])
    np.testing.assert_array_equal(jax.jit(in_turn, donate_argnums=0)(total, w, b), expected)
    assert total.is_deleted()
    np.testing.assert_array_equal(jax.jit(layers)(totals, w, b), before + products)
    np.testing.assert_array_equal(totals, before)
    np.testing.assert_array_equal(jax.jit(update_layers, donate_argnums=0)(totals, w, b), before + products)
