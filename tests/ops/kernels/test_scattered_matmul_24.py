import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper, reference
from sparse_lm.ops.hopper.frame.tiling import Tiling
from tests.ops.kernels import BACKENDS, each_backend, tilings
from tests.ops.operands import assert_as_good_as_reference, assert_repeats, random, random_24, random_contiguous

TILINGS = {
    "hopper": [
        Tiling(128, 256, raster_width=3),
        Tiling(128, 256, share_b=False, raster_width=2),
        Tiling(256, 192, share_b=False, raster_width=3),
        Tiling(128, 128, raster_width=4),
    ],
    "triton": tilings("matmul_24").get("triton", []),
}
each_tiling = pytest.mark.parametrize(
    "backend, config", [(backend, config) for name, backend in BACKENDS.items() for config in TILINGS[name]]
)


def check(kernel, a, b, neuron_ids, v, rows, contiguous, *, out_dtype=None, config=None):
    def product(a, b, neuron_ids):
        return kernel(a, b, neuron_ids, v, rows, contiguous=contiguous, out_dtype=out_dtype, config=config)

    out = assert_repeats(product, a, b, neuron_ids)
    expected = reference.scattered_matmul_24(a, b, neuron_ids, v, rows, out_dtype=out_dtype or b.dtype)
    assert_as_good_as_reference(out, expected, _exact(a, b, np.asarray(neuron_ids), v, rows))
    assert not np.asarray(out)[np.setdiff1d(np.arange(rows), neuron_ids)].any()


def _exact(a, b, neuron_ids, v, rows):
    dense, b = np.asarray(a.to_dense(), np.float64), np.asarray(b, np.float64)
    exact = np.zeros((rows + a.shape[0], b.shape[1]))  # slices past the last row are at the end
    for block, ids in enumerate(neuron_ids):
        tokens = slice(block * v, min((block + 1) * v, len(b)))
        exact[ids] += dense[:, tokens] @ b[tokens]
    return exact[:rows]


@pytest.mark.gpu
@each_tiling
@pytest.mark.parametrize(
    "tokens, n, kept, rows, v, contiguous",
    [
        (2048, 512, 512, 2048, 256, 512),
        (1000, 200, 256, 1024, 192, 256),
        (900, 1001, 768, 1536, 64, 256),
        (100, 64, 256, 256, 128, 256),
        (16384, 768, 1024, 4096, 256, 256),
    ],
)
def test_matches_reference(tokens, n, kept, rows, v, contiguous, backend, config):
    a, b = random_24(kept, tokens, jnp.bfloat16, seed=0), random((tokens, n), jnp.bfloat16, seed=1)
    neuron_ids = random_contiguous(-(-tokens // v), kept, contiguous, rows, seed=2)
    check(backend.scattered_matmul_24, a, b, neuron_ids, v, rows, contiguous, config=config)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("lists", [1, 16, 32])
@pytest.mark.parametrize("rows", [4096, 8192])
def test_slices_that_one_block_lists_or_all_or_none(rows, lists, backend):
    a, b = random_24(512, 4096, jnp.bfloat16, seed=3), random((4096, 520), jnp.bfloat16, seed=4)
    neuron_ids = random_contiguous(32, 512, 128, rows - 128, seed=5, lists=lists) + 128
    neuron_ids = neuron_ids.at[:, :128].set(jnp.arange(128))
    neuron_ids = neuron_ids.at[7].set(rows + jnp.arange(512))  # lists nothing that there is
    check(backend.scattered_matmul_24, a, b, neuron_ids, 128, rows, 128)


@pytest.mark.gpu
@each_tiling
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)])
def test_dtypes(dtype, out_dtype, backend, config):
    a, b = random_24(512, 3000, dtype, seed=6, scale=0.1), random((3000, 520), dtype, seed=7)
    neuron_ids = random_contiguous(12, 512, 256, 1024, seed=8)
    check(backend.scattered_matmul_24, a, b, neuron_ids, 256, 1024, 256, out_dtype=out_dtype, config=config)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("token", [300, 511])  # steps that only fill up a round read no number, either
def test_bad_numbers_reach_the_rows_that_their_block_lists_and_no_other(token, bad, backend):
    a, b = random_24(256, 512, jnp.bfloat16, seed=9), random((512, 512), jnp.bfloat16, seed=10)
    neuron_ids = jnp.stack([jnp.arange(256), jnp.arange(512, 768)])
    column = 7
    out = backend.scattered_matmul_24(a, b.at[token, column].set(bad), neuron_ids, 256, 1024, contiguous=256)
    expected = np.zeros((1024, 512), bool)
    expected[512:768, column] = np.asarray(a.mask())[:, token]
    np.testing.assert_array_equal(~np.isfinite(out), expected)


@pytest.mark.gpu
def test_no_sum_is_lost_when_repeated():
    """A race between the parts of a tile would show as a difference now and then."""
    a, b = random_24(512, 8192, jnp.bfloat16, seed=11), random((8192, 1024), jnp.bfloat16, seed=12)
    neuron_ids, options = random_contiguous(64, 512, 128, 2048, seed=13), dict(contiguous=128, out_dtype=jnp.float32)
    product = jax.jit(lambda: hopper.scattered_matmul_24(a, b, neuron_ids, 128, 2048, **options))
    first = product()
    for _ in range(20):
        np.testing.assert_array_equal(product(), first)
