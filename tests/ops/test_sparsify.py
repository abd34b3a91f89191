import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from tests.ops import jitted, numpy_sparse
from tests.ops.operands import random

METHODS = ["magnitude", "soft_threshold"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(64, 128), (37, 52)])
def test_sparsify_24_matches_numpy(shape, dtype, method):
    x = random(shape, dtype)
    expected, mask = numpy_sparse.sparsify_rows(np.asarray(x, np.float64), method)
    sparse = jitted.sparsify_24(x, method, scale=jnp.float32(1.5))
    np.testing.assert_array_equal(jitted.mask(sparse), mask)
    assert sparse.dtype == dtype
    rounding = float(jnp.finfo(dtype).eps) / 2 + 1e-6  # one rounding to dtype, after float32
    np.testing.assert_allclose(np.asarray(jitted.dense(sparse), np.float64), 1.5 * expected, rtol=rounding, atol=1e-6)


def test_widths_that_are_no_multiple_of_four_count_as_padded_with_zeros():
    x = random((6, 7))
    sparse = jitted.sparsify_24(x, "magnitude")
    expected, _ = numpy_sparse.sparsify_rows(np.pad(x, ((0, 0), (0, 1))), "magnitude")
    np.testing.assert_array_equal(jitted.dense(sparse), expected[:, :7].astype(np.float32))


def test_result_is_rounded_once():
    x = random((16, 64), seed=1)
    scale = 1.4826
    expected, _ = numpy_sparse.sparsify_rows(np.asarray(x), "soft_threshold")
    sparse = jitted.sparsify_24(x, scale=scale, dtype=jnp.bfloat16)
    once = (expected.astype(np.float32) * np.float32(scale)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(jitted.dense(sparse), once)


@pytest.mark.parametrize("shape", [(64, 64), (33, 46)])
def test_tiles_are_24_both_ways_from_one_selection(shape):
    x = random(shape, jnp.bfloat16)
    mask = jitted.transposable_mask(x)
    rows, columns = jitted.sparsify_24_tiles(x, mask, dtype=jnp.float32)
    expected = jnp.where(mask, x, 0)
    np.testing.assert_array_equal(jitted.dense(rows), expected)
    np.testing.assert_array_equal(jitted.dense(columns), expected.T)
    assert rows.dtype == columns.dtype == jnp.float32


@pytest.mark.parametrize("axis", [-1, 0])
def test_soft_threshold_scale_is_least_squares(axis):
    w = np.random.default_rng(3).normal(size=(44, 60)).astype(np.float32)
    s, _ = numpy_sparse.sparsify_rows(w if axis == -1 else w.T, "soft_threshold")
    s = s if axis == -1 else s.T
    expected = np.sum(w * s) / np.sum(s * s)
    np.testing.assert_allclose(ops.soft_threshold_scale(jnp.array(w), axis), expected, rtol=1e-5)


def test_soft_threshold_scale_of_gaussians_and_of_nothing():
    gaussian = random((512, 512), jnp.bfloat16, seed=4)
    assert ops.soft_threshold_scale(gaussian) == pytest.approx(1.48, abs=0.01)  # 2409.09099
    assert ops.soft_threshold_scale(jnp.ones((8, 8))) == 1.0


def test_stacks_of_matrices_go_through_jit_and_vmap():
    stack, key = random((2, 20, 24)), jax.random.key(0)
    scales = jnp.array([1.0, 2.0])
    for method in (*METHODS, "mvue"):
        one = jax.jit(lambda x, scale, method=method: ops.sparsify_24(x, method, scale=scale, key=key).to_dense())
        both = jax.jit(jax.vmap(one))(stack, scales)
        for layer in range(2):
            np.testing.assert_array_equal(both[layer], one(stack[layer], scales[layer]))
