import functools

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import backends, triton
from sparse_lm.ops.triton.frame.product import Tiling
from sparse_lm.ops.triton.products.matmul_24 import CANDIDATES
from tests.ops.operands import PAIRS, assert_agree, assert_as_good_as_reference, random, random_24
from tests.ops.properties import matmul_24 as properties


@pytest.mark.gpu
@pytest.mark.parametrize("config", CANDIDATES)
@pytest.mark.parametrize("out_transposed", [False, True])
@pytest.mark.parametrize("m, k, n", [(512, 320, 768), (300, 333, 1001), (1, 4, 1)])
def test_matches_reference(m, k, n, out_transposed, config):
    properties.check_shape(triton.matmul_24, m, k, n, out_transposed=out_transposed, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, out_dtype", [(jnp.float16, None), (jnp.bfloat16, jnp.float32), (jnp.float16, jnp.bfloat16)]
)
@pytest.mark.parametrize("out_transposed", [False, True])
def test_dtypes(dtype, out_dtype, out_transposed):
    properties.check_dtypes(triton.matmul_24, dtype, out_dtype, out_transposed=out_transposed)


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [[(0, 1)], [(2, 3)], [(0, 3)], PAIRS])
def test_every_pattern_of_positions(pairs):
    properties.check_positions(triton.matmul_24, pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_reach_the_rows_that_read_them_and_no_other(bad):
    properties.check_bad_numbers(triton.matmul_24, bad)


@pytest.mark.gpu
def test_tilings_agree_bit_for_bit():
    """The order of summation is that of k, whatever the tiling: a race would show as a difference."""
    w, b = random_24(2048, 2048, jnp.bfloat16, seed=8), random((2048, 2048), jnp.bfloat16, seed=9)
    assert_agree([functools.partial(triton.matmul_24, config=config) for config in CANDIDATES], w, b)


@pytest.mark.gpu
def test_the_public_op_runs_this_backend():
    w, b = random_24(128, 128, jnp.bfloat16, seed=10), random((128, 64), jnp.bfloat16, seed=11)
    with backends.record() as used:
        out = ops.matmul_24(w, b, implementation="triton")
    assert used == {"matmul_24": {"triton"}}
    exact = np.asarray(w.to_dense(), np.float64) @ np.asarray(b, np.float64)
    assert_as_good_as_reference(out, w.to_dense() @ b, exact)


@pytest.mark.parametrize("dtype, b_dtype, out_dtype", [(jnp.float32,) * 3, (jnp.bfloat16, jnp.float16, None)])
def test_refuses_dtypes(dtype, b_dtype, out_dtype):
    properties.check_refuses_dtypes(triton.matmul_24, dtype, b_dtype, out_dtype)


def test_refuses_tilings_that_do_not_fit():
    config = Tiling(256, 128, warps_m=4, warps_n=2, stages=7)
    w, b = random_24(64, 64, jnp.bfloat16, seed=0), random((64, 64), jnp.bfloat16, seed=1)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        triton.matmul_24(w, b, config=config)
