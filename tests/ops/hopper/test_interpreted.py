"""The code of passes over the hidden layer, run in NumPy: bit for bit the reference, without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper, reference
from sparse_lm.ops.hopper.frame import shared_words
from sparse_lm.ops.mvue import threefry_key
from tests.ops.hopper import interpreter
from tests.ops.operands import random_or_special

TOKENS, NEURONS = 64, 128
GRID = TOKENS // 64, NEURONS // 64
KEY = jax.random.fold_in(jax.random.key(3), 4)
DTYPES = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
SPECIAL = pytest.mark.parametrize("special", [False, True])


def array(*shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def sparse(rows, columns, dtype):
    return [array(rows, columns // 2, dtype=dtype), array(rows // 64, columns // 64, 128, dtype=jnp.int32)]


def assert_same(found, expected):
    """Equal numbers; NaN is NaN. Drawn zeros may lose their signs in the reference."""
    for ours, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(*(np.asarray(x, np.float64) for x in (ours, wanted)))


def parts(*matrices):
    return [part for matrix in matrices for part in (matrix.values, matrix.metadata)]


@SPECIAL
@DTYPES
def test_gated_squared_relu_24(dtype, special, monkeypatch):
    h = random_or_special((TOKENS, 2 * NEURONS), dtype, 1, special)
    y, seen = reference.gated_squared_relu_24(h)
    tiles = GRID[0] * GRID[1]
    results = [*sparse(TOKENS, NEURONS, dtype), array(tiles, 4, 3, dtype=jnp.float32)]
    *found, stats = interpreter.run(hopper.gated_squared_relu_24, [h], [h], results, [], GRID, monkeypatch)
    assert_same(found, parts(y))
    np.testing.assert_allclose(stats.sum(axis=(0, 1)), seen, rtol=1e-5)


@SPECIAL
@DTYPES
def test_gated_squared_relu_gradients(dtype, special, monkeypatch):
    h = random_or_special((TOKENS, 2 * NEURONS), dtype, 1, special)
    dy = random_or_special((TOKENS, NEURONS), dtype, 2, special)
    y, _ = reference.gated_squared_relu_24(h)
    wanted = jax.jit(lambda *args: reference.gated_squared_relu_gradients(*args, key=KEY))(dy, h, y)
    results = [array(TOKENS, NEURONS, dtype=dtype), *sparse(2 * NEURONS, TOKENS, dtype)]
    found = interpreter.run(
        lambda *args: hopper.gated_squared_relu_gradients(*args, key=KEY),
        [dy, h, y],
        [dy, h, y.values, y.metadata, threefry_key(KEY)],
        [*results, *sparse(NEURONS, TOKENS, dtype)],
        [4 * shared_words.COUNT] * 2,
        GRID,
        monkeypatch,
    )
    assert_same(found, [wanted.dh.values, *parts(wanted.dh_t, wanted.y_t)])
    assert_same([jnp.concatenate([y.metadata] * 2, axis=1)], [wanted.dh.metadata])


@SPECIAL
@DTYPES
def test_squared_relu_gradients(dtype, special, monkeypatch):
    """This one runs on GPUs, too, where it gives the reference's bits: the interpreter is right."""
    y, _ = jax.jit(reference.squared_relu_24)(random_or_special((TOKENS, NEURONS), dtype, 1))
    dy = random_or_special((TOKENS, NEURONS), dtype, 2, special)
    wanted = jax.jit(lambda *args: reference.squared_relu_gradients(*args, key=KEY))(dy, y)
    found = interpreter.run(
        lambda *args: hopper.squared_relu_gradients(*args, key=KEY),
        [dy, y],
        [dy, y.values, y.metadata, threefry_key(KEY)],
        [array(TOKENS, NEURONS // 2, dtype=dtype), *sparse(NEURONS, TOKENS, dtype) * 2],
        [4 * shared_words.COUNT, 4 * interpreter.THREADS],
        GRID,
        monkeypatch,
    )
    assert_same(found, [wanted.dh.values, *parts(wanted.dh_t, wanted.y_t)])
