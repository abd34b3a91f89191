import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import fp8
from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.hopper import matmul_24_fp8
from sparse_lm.ops.hopper.frame.tiling import Tiling
from sparse_lm.ops.hopper.products.matmul_24 import CANDIDATES
from tests.ops.operands import assert_agree, assert_as_good_as_reference, assert_repeats, random, random_24

TILINGS = [*(config for config, _ in CANDIDATES), Tiling(128, 128)]


def operands(m, k, n, seed=0):
    """A 2:4 matrix and the transpose of a dense one, in e4m3, and scales of rows."""
    a, b_t = random_24(m, k, fp8.E4M3, seed), random((n, k), fp8.E4M3, seed + 1)
    scale = 2.0 ** np.random.default_rng(seed + 2).integers(-20, 20, (m, 1))
    return a, b_t, jnp.asarray(scale, jnp.float32)


def exact(a, b_t, scale):
    return np.asarray(scale, np.float64) * (np.asarray(a.to_dense(), np.float64) @ np.asarray(b_t, np.float64).T)


def check(a, b_t, scale, out_dtype=jnp.bfloat16, config=None):
    out = assert_repeats(functools.partial(matmul_24_fp8, out_dtype=out_dtype, config=config), a, b_t, scale)
    expected = exact(a, b_t, scale)
    # By rows, whose scales differ. Of the sum so far the tensor cores keep some 14 bits, and drop the rest.
    error = np.linalg.norm(np.asarray(out, np.float64) - expected, axis=1) / np.linalg.norm(expected, axis=1)
    dropped = a.shape[1] / 64 * 2**-13
    assert out.dtype == out_dtype and error.max() < dropped + (0.004 if out_dtype == jnp.bfloat16 else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("config", TILINGS)
@pytest.mark.parametrize("m, k, n", [(512, 384, 768), (300, 1152, 1001), (64, 128, 64), (256, 8192, 192), (1, 128, 1)])
def test_matches_reference(m, k, n, config):
    check(*operands(m, k, n), config=config)


@pytest.mark.gpu
def test_float32_results():
    check(*operands(200, 1024, 392), out_dtype=jnp.float32)


@pytest.mark.gpu
def test_error_is_that_of_the_rounding_to_e4m3():
    y = ops.sparsify_24(jnp.square(jax.nn.relu(random((512, 2048), seed=4))), "magnitude", dtype=jnp.bfloat16)
    w = random((2048, 384), jnp.bfloat16, seed=5)
    rows, matrix = fp8.by_rows(y.values), fp8.whole(w)
    a, scale = Sparse24(rows.values, y.metadata, y.shape), rows.scale * matrix.scale
    out = matmul_24_fp8(a, matrix.values.T, scale)
    emulation = jnp.asarray(exact(a, matrix.values.T, scale), jnp.bfloat16)
    assert_as_good_as_reference(out, emulation, np.asarray(y.to_dense(), np.float64) @ np.asarray(w, np.float64))


@pytest.mark.gpu
def test_tilings_agree_bit_for_bit():
    """Of few columns no sum is split: its order is that of k, whatever the tiling, and a race would be a difference."""
    configs = [*TILINGS, Tiling(128, 192)]
    assert_agree([functools.partial(matmul_24_fp8, config=config) for config in configs], *operands(2048, 1920, 2048))


@pytest.mark.gpu
def test_bad_numbers_stay_in_their_rows():
    a, b_t, scale = operands(192, 256, 128)
    out = np.asarray(matmul_24_fp8(a, b_t, scale.at[50].set(np.nan)), np.float32)
    assert np.isnan(out[50]).all() and np.isfinite(np.delete(out, 50, axis=0)).all()
