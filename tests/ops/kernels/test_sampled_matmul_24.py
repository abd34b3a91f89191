"""`sampled_matmul_24`, of neurons in any order and, on Hopper by a kernel of its own, of contiguous ones."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper, reference
from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.hopper.products import sampled_matmul_24, sampled_rows_24
from tests.ops.kernels import BACKENDS, each_backend, tilings
from tests.ops.operands import (
    assert_agree,
    assert_as_good_as_reference,
    assert_repeats,
    random,
    random_24,
    random_columns,
    random_contiguous,
)

DTYPES = [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)]
CONTIGUOUS = [config for config, _ in sampled_matmul_24.CANDIDATES]
TRITON = tilings("sampled_matmul_24").get("triton", [])
# Kernels, with a tiling, the tokens of its tile, and whether neurons must be contiguous.
TILINGS = [
    *((sampled_rows_24.sampled_rows_24, tokens, tokens, False) for tokens in sampled_rows_24.CANDIDATES),
    *((BACKENDS["triton"].sampled_matmul_24, config, config.tile_n, False) for config in TRITON),
    *((hopper.sampled_matmul_24, config, config.tile_n, True) for config in CONTIGUOUS),
]
ANY_ORDER = list(dict.fromkeys(kernel for kernel, *_, in_slices in TILINGS if not in_slices))


def check(kernel, w, x, neuron_ids, v, *, out_dtype=None, **options):
    options = dict(options, out_dtype=out_dtype)
    out = assert_repeats(lambda *operands: kernel(*operands, v, **options), w, x, neuron_ids)
    expected = reference.sampled_matmul_24(w, x, neuron_ids, v, out_dtype=out_dtype or x.dtype)
    dense, ids = np.pad(np.asarray(w.to_dense(), np.float64), ((0, 1), (0, 0))), np.asarray(neuron_ids)
    exact = np.stack([dense[ids[t // v]] @ row for t, row in enumerate(np.asarray(x, np.float64))])
    assert_as_good_as_reference(out, expected, exact)


# Tokens, dim, neurons, kept, contiguous, blocks of a tile.
IN_ANY_ORDER = [
    (768, 512, 1024, 512, 1, 1),
    (1000, 333, 1280, 601, 1, 2),
    (300, 64, 500, 500, 1, 1),
    (1, 100, 64, 8, 1, 1),
]
IN_SLICES = [
    (768, 512, 1024, 512, 512, 2),
    (1000, 333, 1280, 640, 128, 1),
    (300, 64, 768, 192, 64, 1),
    (1, 100, 256, 64, 64, 1),
    (1536, 1024, 4096, 1024, 256, 1),
    (1153, 2048, 1152, 1152, 192, 1),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kernel, config, tile, shape",
    [(*tiling, shape) for *tiling, in_slices in TILINGS for shape in (IN_SLICES if in_slices else IN_ANY_ORDER)],
)
def test_matches_reference(shape, kernel, config, tile):
    tokens, dim, neurons, kept, contiguous, blocks = shape
    w, x, v = random_24(neurons, dim, jnp.bfloat16, seed=0), random((tokens, dim), jnp.bfloat16, seed=1), blocks * tile
    count, options = -(-tokens // v), dict(contiguous=contiguous) if contiguous > 1 else {}
    in_slices = random_contiguous(count, kept, contiguous, neurons, seed=2)
    neuron_ids = in_slices if contiguous > 1 else random_columns(count, kept, neurons, seed=2)
    check(kernel, w, x, neuron_ids, v, config=config, **options)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("dtype, out_dtype", DTYPES)
@pytest.mark.parametrize("v", [64, 128, 192, 256])
@pytest.mark.parametrize("contiguous", [1, 32, 128])
def test_dtypes(dtype, out_dtype, v, contiguous, backend):
    w, x = random_24(512, 256, dtype, seed=3, scale=0.1), random((700, 256), dtype, seed=4)
    slices = random_columns(-(-700 // v), 256 // contiguous, 512 // contiguous - 1, seed=5)
    neuron_ids = (slices[..., None] * contiguous + jnp.arange(contiguous)).reshape(slices.shape[0], -1)
    check(backend.sampled_matmul_24, w, x, neuron_ids, v, contiguous=contiguous, out_dtype=out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel, config, tile, in_slices", TILINGS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_reach_the_blocks_that_list_them_and_no_other(bad, kernel, config, tile, in_slices):
    """Spoils one neuron that the second of two blocks lists, and all that neither lists."""
    lists = np.array([np.arange(1, 256, 2), np.arange(511, 256, -2)])
    if in_slices:
        lists = np.array([np.arange(128, 256), np.arange(384, 512)])
    w, x = random_24(512, 256, jnp.bfloat16, seed=6), random((2 * tile, 256), jnp.bfloat16, seed=7)
    values = w.values.at[np.setdiff1d(np.arange(512), lists)].set(bad).at[lists[1, 16], 5].set(bad)
    product = functools.partial(kernel, v=tile, config=config, **dict(contiguous=128) if in_slices else {})
    out = np.asarray(product(Sparse24(values, w.metadata, w.shape), x, jnp.asarray(lists, jnp.int32)), np.float32)
    assert np.isfinite(out[:tile]).all() and not np.isfinite(out[tile:, 16]).any()
    assert np.isfinite(np.delete(out[tile:], 16, axis=1)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ANY_ORDER)
def test_tilings_agree_bit_for_bit(kernel):
    configs = [config for other, config, _, _ in TILINGS if other is kernel]
    w, x = random_24(4096, 1024, jnp.bfloat16, seed=8), random((4096, 1024), jnp.bfloat16, seed=9)
    neuron_ids = random_columns(16, 1024, 4096, seed=10)
    assert_agree([functools.partial(kernel, v=256, config=config) for config in configs], w, x, neuron_ids)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONTIGUOUS)
@pytest.mark.parametrize("dim", [512, 320])  # an even and an odd number of steps
def test_blocks_that_list_nothing_are_zeros(dim, config):
    v, neurons = 2 * config.tile_n, 1024
    w, x = random_24(neurons, dim, jnp.bfloat16, seed=8), random((9 * v, dim), jnp.bfloat16, seed=9)
    ids, nothing = random_contiguous(9, 512, 128, neurons, seed=10), jnp.array([2, 6, 7, 8])
    product = lambda ids: hopper.sampled_matmul_24(w, x, ids, v, contiguous=128, config=config)  # noqa: E731
    expected = product(ids).reshape(9, v, 512).at[nothing].set(0).reshape(9 * v, 512)
    np.testing.assert_array_equal(assert_repeats(product, ids.at[nothing].set(neurons)), expected)
    assert not assert_repeats(product, jnp.full_like(ids, neurons)).any()
