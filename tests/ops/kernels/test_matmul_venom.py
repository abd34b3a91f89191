"""`matmul_venom`, of columns in any order and, on Hopper by a kernel of its own, of contiguous ones."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops.hopper.products.matmul_venom import Config
from sparse_lm.ops.hopper.products.matmul_venom_contiguous import CANDIDATES, matmul_venom_contiguous
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

EXTRA = dict(hopper=[Config(128, 256, stages=3, cluster=1, store_slots=4)])
CONTIGUOUS = [config for config, _ in CANDIDATES]
WIDTH = 1024  # of what rows are put back of
DTYPES = [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)]


def exact(a, b):
    return np.asarray(a.to_dense(), np.float64) @ np.asarray(b, np.float64)


def check(matmul_venom, a, b, *, out_dtype=None, config=None):
    out = assert_repeats(lambda a, b: matmul_venom(a, b, out_dtype=out_dtype, config=config), a, b)
    reference = jnp.matmul(a.to_dense(), b, preferred_element_type=jnp.float32).astype(out_dtype or b.dtype)
    assert_as_good_as_reference(out, reference, exact(a, b))


@pytest.mark.gpu
@each_tiling("matmul_venom", **EXTRA)
@pytest.mark.parametrize(
    "rows, k, n, blocks_of_tile, m",
    [(512, 1024, 512, 1, 16), (300, 1008, 261, 1, 16), (1000, 960, 200, 2, 8), (1, 4, 1, 1, 4)],
)
def test_matches_reference(rows, k, n, blocks_of_tile, m, backend, config):
    a = random_venom(rows, k, blocks_of_tile * config.tile_m, m, jnp.bfloat16, seed=0)
    check(backend.matmul_venom, a, random((k, n), jnp.bfloat16, seed=2), config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONTIGUOUS)
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
    check(matmul_venom_contiguous, a, random((k, n), jnp.bfloat16, seed=2), config=config)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("dtype, out_dtype", DTYPES)
@pytest.mark.parametrize("v", [64, 128, 256])
def test_dtypes(dtype, out_dtype, v, backend):
    b = random((WIDTH, 256), dtype, seed=5)
    check(backend.matmul_venom, random_venom(256, WIDTH, v, 16, dtype, seed=3), b, out_dtype=out_dtype)
    contiguous = random_venom_contiguous(700, WIDTH, 256, v, 128, dtype, seed=3)
    check(backend.matmul_venom, contiguous, b, out_dtype=out_dtype)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("v, contiguous", [(64, 64), (128, 96)])
def test_contiguous_columns_that_no_box_fits(v, contiguous, backend):
    a = random_venom_contiguous(300, 768, 192, v, contiguous, jnp.bfloat16, seed=12)
    check(backend.matmul_venom, a, random((768, 256), jnp.bfloat16, seed=14))


ORDERS = pytest.mark.parametrize("tokens, n", [(2000, 512), (333, 200), (129, 1001)])
ORDERED_DTYPES = pytest.mark.parametrize("dtype, out_dtype", [(jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float32)])


def _check_order_of_tokens(product, random_a, tokens, n, v, dtype):
    """Rows go back into it bit for bit; `random_a` gives a matrix of so many rows and WIDTH columns."""
    rows = random_rows(tokens, (tokens + 2 * v) // v * v, seed=14)
    a, b = random_a(rows.slots.shape[0]), random((WIDTH, n), dtype, seed=16)
    out = assert_repeats(lambda a, b, rows: product(a, b, rows=rows), a, b, rows)
    position = np.asarray(rows.position)
    np.testing.assert_array_equal(out, np.asarray(jax.jit(product)(a, b))[position])
    reference = jnp.matmul(a.to_dense(), b, preferred_element_type=jnp.float32).astype(out.dtype)
    assert_as_good_as_reference(out, reference[position], exact(a, b)[position])


@pytest.mark.gpu
@each_tiling("matmul_venom", **EXTRA)
@ORDERS
@ORDERED_DTYPES
def test_puts_rows_back_in_the_order_of_the_tokens(tokens, n, dtype, out_dtype, backend, config):
    v = max(128, config.tile_m)
    product = functools.partial(backend.matmul_venom, out_dtype=out_dtype, config=config)
    random_a = functools.partial(random_venom, k=WIDTH, v=v, m=16, dtype=dtype, seed=15)
    _check_order_of_tokens(product, random_a, tokens, n, v, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONTIGUOUS)
@ORDERS
@ORDERED_DTYPES
def test_puts_rows_of_contiguous_columns_back(tokens, n, dtype, out_dtype, config):
    product = functools.partial(matmul_venom_contiguous, out_dtype=out_dtype, config=config)
    random_a = functools.partial(random_venom_contiguous, k=WIDTH, kept=256, v=256, contiguous=64, dtype=dtype, seed=15)
    _check_order_of_tokens(product, random_a, tokens, n, 256, dtype)


def _check_bad_numbers(product, a, b, bad):
    """Checks that bad numbers do no harm in rows of b that no block keeps."""
    kept = np.asarray(a.columns)
    kept_by_none = np.setdiff1d(np.arange(b.shape[0]), kept)
    np.testing.assert_array_equal(product(a, b.at[kept_by_none].set(bad)), product(a, b))
    row = np.setdiff1d(kept[0], kept[1])[0] if (kept[0] != kept[1]).any() else kept[0, 3]
    out = product(a, b.at[row].set(bad))
    np.testing.assert_array_equal(~np.isfinite(out).all(axis=1), np.asarray(a.mask())[:, row])


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_in_rows_that_no_block_keeps(bad, backend):
    a, b = random_venom(256, 512, 128, 16, jnp.bfloat16, seed=6), random((512, 256), jnp.bfloat16, seed=8)
    _check_bad_numbers(backend.matmul_venom, a, b, bad)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("config", CONTIGUOUS)
def test_bad_numbers_in_rows_that_no_slice_has(bad, config):
    a = random_venom_contiguous(512, 1024, 192, 256, 64, jnp.bfloat16, seed=6)
    a = dataclasses.replace(a, columns=a.columns.at[1].set(a.columns[0]))
    product = functools.partial(matmul_venom_contiguous, config=config)
    _check_bad_numbers(product, a, random((1024, 512), jnp.bfloat16, seed=8), bad)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_tilings_agree_bit_for_bit(name):
    """Too short to be split along k, a tile is summed in the order of k: a race would show as a difference."""
    a, b = random_venom(4096, 1024, 256, 8, jnp.bfloat16, seed=9), random((1024, 4096), jnp.bfloat16, seed=11)
    configs = tilings("matmul_venom", **EXTRA)[name]
    assert_agree([functools.partial(BACKENDS[name].matmul_venom, config=config) for config in configs], a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONTIGUOUS)
@pytest.mark.parametrize("kept", [512, 320])  # an even and an odd number of steps
def test_blocks_that_list_nothing_are_zeros(kept, config):
    a = random_venom_contiguous(9 * 256, 1280, kept, 256, 64, jnp.bfloat16, seed=9)
    b = random((1280, 1000), jnp.bfloat16, seed=11)
    nothing = jnp.array([2, 6, 7, 8])
    product = lambda columns: matmul_venom_contiguous(dataclasses.replace(a, columns=columns), b, config=config)  # noqa: E731
    expected = product(a.columns).reshape(9, 256, 1000).at[nothing].set(0).reshape(9 * 256, 1000)
    np.testing.assert_array_equal(assert_repeats(product, a.columns.at[nothing].set(1280)), expected)
    assert not assert_repeats(product, jnp.full_like(a.columns, 1280)).any()


@each_backend
def test_refuses_small_blocks(backend):
    with pytest.raises(NotImplementedError, match="multiple of 64"):
        backend.matmul_venom(random_venom(64, 64, 32, 16, jnp.bfloat16, seed=0), random((64, 64), jnp.bfloat16, seed=1))


def test_refuses_contiguous_columns_that_no_box_fits():
    b = random((128, 64), jnp.bfloat16, seed=1)
    with pytest.raises(NotImplementedError, match="multiple of 128"):
        matmul_venom_contiguous(random_venom_contiguous(64, 128, 64, 64, 64, jnp.bfloat16, seed=0), b)
    with pytest.raises(NotImplementedError, match="multiple of 64, not 96"):
        matmul_venom_contiguous(random_venom_contiguous(64, 192, 96, 128, 96, jnp.bfloat16, seed=0), b)
