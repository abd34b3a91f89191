"""`matmul_venom`, of columns in any order and of contiguous ones, for which Hopper has tilings of their own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper
from sparse_lm.ops.hopper.products.matmul_venom import CONTIGUOUS
from tests.ops.kernels import BACKENDS, each_backend, each_tiling, tilings
from tests.ops.operands import (
    assert_agree,
    assert_as_good_as_reference,
    assert_repeats,
    random,
    random_rows,
    random_venom,
    random_venom_contiguous,
)

WIDTH = 1024
each_contiguous = pytest.mark.parametrize("config", [config for config, _ in CONTIGUOUS])
each_tiling_of_both = pytest.mark.parametrize(
    "backend, config, contiguous",
    [
        *((BACKENDS[name], c, 1) for name, configs in tilings("matmul_venom").items() for c in configs),
        *((hopper, config, 64) for config, _ in CONTIGUOUS),
    ],
)


def random_a(rows, contiguous, dtype=jnp.bfloat16):
    """A matrix of WIDTH columns and blocks of 256 rows that every tile divides."""
    if contiguous == 1:
        return random_venom(rows, WIDTH, 256, 16, dtype, seed=15)
    return random_venom_contiguous(rows, WIDTH, 256, 256, contiguous, dtype, seed=15)


def exact(a, b):
    return np.asarray(a.to_dense(), np.float64) @ np.asarray(b, np.float64)


def check(matmul_venom, a, b, *, out_dtype=None, config=None):
    out = assert_repeats(lambda a, b: matmul_venom(a, b, out_dtype=out_dtype, config=config), a, b)
    reference = jnp.matmul(a.to_dense(), b, preferred_element_type=jnp.float32).astype(out_dtype or b.dtype)
    assert_as_good_as_reference(out, reference, exact(a, b))


@pytest.mark.gpu
@each_tiling("matmul_venom")
@pytest.mark.parametrize(
    "rows, k, n, blocks_of_tile, m",
    [(512, 1024, 512, 1, 16), (300, 1008, 261, 1, 16), (1000, 960, 200, 2, 8), (1, 4, 1, 1, 4)],
)
def test_matches_reference(rows, k, n, blocks_of_tile, m, backend, config):
    a = random_venom(rows, k, blocks_of_tile * config.tile_m, m, jnp.bfloat16, seed=0)
    check(backend.matmul_venom, a, random((k, n), jnp.bfloat16, seed=2), config=config)


@pytest.mark.gpu
@each_contiguous
@pytest.mark.parametrize(
    "rows, k, kept, n, v, contiguous",
    [
        (1024, 1024, 512, 768, 256, 512),
        (1000, 2048, 640, 200, 256, 128),
        (300, 384, 192, 1001, 512, 64),
        (1, 256, 64, 1, 256, 64),
        (700, 8192, 2048, 1024, 256, 2048),
    ],
)
def test_contiguous_columns_match_reference(rows, k, kept, n, v, contiguous, config):
    a = random_venom_contiguous(rows, k, kept, v, contiguous, jnp.bfloat16, seed=0)
    check(hopper.matmul_venom, a, random((k, n), jnp.bfloat16, seed=2), config=config)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)])
@pytest.mark.parametrize("v, contiguous", [(64, 128), (128, 128), (256, 128), (64, 64), (128, 32)])
def test_dtypes(dtype, out_dtype, v, contiguous, backend):
    """The last two of the contiguous columns are such that no box fits."""
    b = random((WIDTH, 256), dtype, seed=5)
    check(backend.matmul_venom, random_venom(256, WIDTH, v, 16, dtype, seed=3), b, out_dtype=out_dtype)
    of_runs = random_venom_contiguous(700, WIDTH, 256, v, contiguous, dtype, seed=3)
    check(backend.matmul_venom, of_runs, b, out_dtype=out_dtype)


@pytest.mark.gpu
@each_tiling_of_both
@pytest.mark.parametrize("tokens, n", [(2000, 512), (333, 200), (129, 1001)])
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float32)])
def test_puts_rows_back_in_the_order_of_the_tokens(tokens, n, dtype, out_dtype, backend, config, contiguous):
    product = functools.partial(backend.matmul_venom, out_dtype=out_dtype, config=config)
    rows = random_rows(tokens, (tokens + 2 * 256) // 256 * 256, seed=14)
    a, b = random_a(rows.slots.shape[0], contiguous, dtype), random((WIDTH, n), dtype, seed=16)
    out = assert_repeats(lambda a, b, rows: product(a, b, rows=rows), a, b, rows)
    position = np.asarray(rows.position)
    np.testing.assert_array_equal(out, np.asarray(jax.jit(product)(a, b))[position])
    reference = jnp.matmul(a.to_dense(), b, preferred_element_type=jnp.float32).astype(out_dtype)
    assert_as_good_as_reference(out, reference[position], exact(a, b)[position])


@pytest.mark.gpu
@each_tiling_of_both
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_in_rows_that_no_block_keeps_do_no_harm(bad, backend, config, contiguous):
    a, b = random_a(512, contiguous), random((WIDTH, 512), jnp.bfloat16, seed=8)
    product = functools.partial(backend.matmul_venom, config=config)
    kept = np.asarray(a.columns)
    kept_by_none = np.setdiff1d(np.arange(WIDTH), kept)
    np.testing.assert_array_equal(product(a, b.at[kept_by_none].set(bad)), product(a, b))
    (row, *_) = np.setdiff1d(kept[0], kept[1])
    out = product(a, b.at[row].set(bad))
    np.testing.assert_array_equal(~np.isfinite(out).all(axis=1), np.asarray(a.mask())[:, row])


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_tilings_agree_bit_for_bit(name):
    """Too short to be split along k, a tile is summed in the order of k: a race would show as a difference."""
    a, b = random_venom(4096, 1024, 256, 8, jnp.bfloat16, seed=9), random((1024, 4096), jnp.bfloat16, seed=11)
    configs = tilings("matmul_venom")[name]
    assert_agree([functools.partial(BACKENDS[name].matmul_venom, config=config) for config in configs], a, b)


@pytest.mark.gpu
@each_contiguous
@pytest.mark.parametrize("kept", [512, 320])  # an even and an odd number of steps
def test_blocks_that_list_nothing_are_zeros(kept, config):
    a = random_venom_contiguous(9 * 256, 1280, kept, 256, 64, jnp.bfloat16, seed=9)
    b = random((1280, 1000), jnp.bfloat16, seed=11)
    nothing = jnp.array([2, 6, 7, 8])
    product = lambda columns: hopper.matmul_venom(dataclasses.replace(a, columns=columns), b, config=config)  # noqa: E731
    expected = product(a.columns).reshape(9, 256, 1000).at[nothing].set(0).reshape(9 * 256, 1000)
    np.testing.assert_array_equal(assert_repeats(product, a.columns.at[nothing].set(1280)), expected)
    assert not assert_repeats(product, jnp.full_like(a.columns, 1280)).any()
