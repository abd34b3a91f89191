import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import triton
from sparse_lm.ops.triton.products.matmul_24 import CANDIDATES
from tests.ops.operands import random, random_24, random_contiguous
from tests.ops.properties import scattered_matmul_24 as properties


@pytest.mark.gpu
@pytest.mark.parametrize("config", CANDIDATES)
@pytest.mark.parametrize(
    "tokens, n, kept, rows, v, contiguous",
    [(2048, 512, 512, 2048, 256, 512), (1000, 200, 256, 1024, 192, 256), (900, 1001, 768, 1536, 64, 256)],
)
def test_matches_reference(tokens, n, kept, rows, v, contiguous, config):
    properties.check_shape(triton.scattered_matmul_24, tokens, n, kept, rows, v, contiguous, config)


@pytest.mark.gpu
@pytest.mark.parametrize("contiguous", [64, 128])
def test_slices_that_one_block_lists_or_all_or_none(contiguous):
    a, b = random_24(512, 4096, jnp.bfloat16, seed=3), random((4096, 264), jnp.bfloat16, seed=4)
    columns = random_contiguous(32, 512, contiguous, 4096 - contiguous, seed=5, lists=32) + contiguous
    columns = columns.at[:, :contiguous].set(jnp.arange(contiguous))
    columns = columns.at[7].set(4096 + jnp.arange(512))  # lists nothing that there is
    properties.check(triton.scattered_matmul_24, a, b, columns, 128, 4096, contiguous)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)])
def test_dtypes(dtype, out_dtype):
    properties.check_dtypes(triton.scattered_matmul_24, dtype, out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_reach_the_rows_that_their_block_lists_and_no_other(bad):
    """Steps that only fill up a round read none of them."""
    properties.check_bad_numbers(triton.scattered_matmul_24, bad, token=511)


@pytest.mark.parametrize(
    "v, rows, contiguous, message",
    [(64, 256, 32, "multiples of 64"), (96, 256, 128, "multiples of 64"), (64, 200, 128, "divide the 200 rows")],
)
def test_refuses(v, rows, contiguous, message):
    a, b = random_24(128, 128, jnp.bfloat16, seed=0), random((128, 64), jnp.bfloat16, seed=1)
    with pytest.raises(NotImplementedError, match=message):
        triton.scattered_matmul_24(a, b, jnp.arange(128)[None].repeat(2, axis=0), v, rows, contiguous=contiguous)
