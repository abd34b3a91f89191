"""Kernels refuse what they do not take, and name the operand or the tiling; no GPU is needed."""

import functools

import jax
import jax.numpy as jnp
import pytest

from sparse_lm.ops import fp8, hopper, reference
from sparse_lm.ops.hopper.frame.compat import TRANSPOSING_LOADS
from sparse_lm.ops.hopper.frame.tiling import Tiling
from sparse_lm.ops.hopper.products import (
    matmul_venom,
    sampled_matmul_24,
    sampled_rows_24,
    scattered_matmul_24,
)
from tests.ops.kernels import each_backend
from tests.ops.operands import random, random_24, random_columns, random_venom, random_venom_contiguous

WIDE, NARROW = jnp.float32, jnp.bfloat16
X, H = jnp.zeros((64, 64), NARROW), jnp.zeros((64, 128), NARROW)
RBG = jax.random.key(0, impl="rbg")
OPTIONS = dict(scale=1.0, dtype=NARROW)


def w(rows, columns, dtype=NARROW):
    return random_24(rows, columns, dtype, seed=0)


def ids(tokens, v):
    return random_columns(-(-tokens // v), 128, 256, seed=2)


@functools.cache
def y():
    return reference.squared_relu_24(X)[0]


def scattered(backend, tokens, v, rows, contiguous, **options):
    b, neuron_ids = random((tokens, 64), NARROW, seed=1), jnp.arange(128)[None].repeat(-(-tokens // v), axis=0)
    return backend.scattered_matmul_24(w(128, tokens), b, neuron_ids, v, rows, contiguous=contiguous, **options)


OF_ALL = [
    ("bfloat16", lambda b: b.matmul_24(w(64, 64, WIDE), X.astype(WIDE), out_dtype=WIDE)),
    ("bfloat16", lambda b: b.matmul_24(w(64, 64), X.astype(jnp.float16))),
    ("multiple of 64", lambda b: b.matmul_venom(random_venom(64, 64, 32, 16, NARROW, seed=0), X)),
    ("multiple of 64, not 96", lambda b: b.sampled_matmul_24(w(64, 64), X, ids(64, 96), 96)),
    ("multiple", lambda b: scattered(b, 128, 64, 256, 32)),
    ("multiple", lambda b: scattered(b, 128, 96, 256, 128)),
    ("divide the 200 rows", lambda b: scattered(b, 128, 64, 200, 128)),
    ("16-bit", lambda b: b.sparsify_24(X, "magnitude", -1, dtype=WIDE, scale=1.0)),
    ("float16", lambda b: b.squared_relu_24(X.astype(WIDE))),
    ("threefry2x32, not of rbg", lambda b: b.sparsify_24(X, "mvue", -1, key=RBG, **OPTIONS)),
    ("threefry2x32, not of rbg", lambda b: b.squared_relu_gradients(X, y(), key=RBG)),
    ("contiguous", lambda b: b.squared_relu_gradients(X, random_venom_contiguous(64, 128, 64, 64, 64, NARROW, seed=0))),
    ("in the dtype of the matrix", lambda b: b.sparsify_venom(X, 64, 16, dtype=jnp.float16)),
    ("v to be a multiple of 64", lambda b: b.squared_relu_venom(jnp.zeros((96, 768), NARROW), 96, 16)),
    (", m ", lambda b: b.squared_relu_venom(jnp.zeros((64, 768), NARROW), 64, 12)),
    ("not for 96", lambda b: b.soft_threshold_24(jnp.zeros((192, 64)), jnp.ones(2), dtype=NARROW)),
]


@each_backend
@pytest.mark.parametrize("message, call", OF_ALL)
def test_no_backend_takes(message, call, backend):
    with pytest.raises(NotImplementedError, match=message):
        call(backend)


def cross_entropy(tokens, dim, vocabulary, dtype=NARROW):
    x, of_classes = jnp.zeros((tokens, dim), dtype), jnp.zeros((vocabulary, dim), dtype)
    return hopper.cross_entropy(x, of_classes, jnp.zeros(tokens, jnp.int32), vocabulary)


def add_norm(width, dtype=NARROW):
    return hopper.add_norm(jnp.zeros((4, width), dtype), None, jnp.ones(width), 1e-5)


def matmul_24_fp8(k, dtype=fp8.E4M3):
    return hopper.matmul_24_fp8(w(64, k, fp8.E4M3), jnp.zeros((64, k), dtype), jnp.ones((64, 1)))


OF_HOPPER = [
    ("K = 192 to be a multiple of 128", lambda: matmul_24_fp8(192)),
    (r"float8_e4m3fn .* not float8_e4m3fn, bfloat16", lambda: matmul_24_fp8(256, NARROW)),
    ("D = 8448 must be at most 8192", lambda: add_norm(8448)),
    ("D = 320 must be a multiple of 256", lambda: add_norm(320)),
    ("takes bfloat16 or float16, not float32", lambda: add_norm(256, WIDE)),
    ("T = 192 must be a multiple of 128", lambda: cross_entropy(192, 256, 512)),
    ("V = 384 must be a multiple of 256", lambda: cross_entropy(128, 256, 384)),
    ("D = 320 must be a multiple of 256", lambda: cross_entropy(128, 320, 512)),
    ("takes bfloat16, not float32", lambda: cross_entropy(128, 256, 512, WIDE)),
    (
        "v = 64 must be a multiple of 128",
        lambda: hopper.grouped_up(jnp.zeros((384, 256), NARROW), jnp.zeros((768, 256), NARROW), jnp.arange(6), 64, 3),
    ),
    ("multiple of 128", lambda: scattered(hopper, 128, 64, 256, 64)),
    ("more than 64 columns", lambda: scattered(hopper, 64, 64, 256, 128)),
    ("multiple of 128 or 192", lambda: sampled_matmul_24.heuristic_config(64, 64, 64, 64)),
]
OF_FP8_ROWS = [
    ("takes bfloat16, not float32", (64, 256), WIDE),
    ("T = 48 must be a multiple of 32", (48, 256), NARROW),
    ("N = 192 to be a multiple of 128", (64, 192), NARROW),
    ("128 times 2, 4 or 8", (64, 128 * 17), NARROW),
]
if TRANSPOSING_LOADS:  # else it is refused for the JAX that there is
    OF_HOPPER += [(m, lambda s=s, d=d: hopper.fp8_rows(jnp.zeros(s, d))) for m, s, d in OF_FP8_ROWS]


@pytest.mark.parametrize("message, call", OF_HOPPER)
def test_hopper_takes_no(message, call):
    with pytest.raises(NotImplementedError, match=message):
        call()


OF_TILINGS = [
    ("tile_m must be 64, 128 or 256", lambda: Tiling(192, 128)),
    (
        "256 rows of a tile must divide the 128",
        lambda: hopper.matmul_venom(VENOM, H.T, config=matmul_venom.CONTIGUOUS[1][0]),
    ),
    (
        "192 tokens of a tile must divide the 128",
        lambda: hopper.sampled_matmul_24(
            w(256, 64), X256, ids(256, 128), 128, contiguous=64, config=sampled_matmul_24.CANDIDATES[0][0]
        ),
    ),
    (
        "128 tokens of a tile must divide the 64",
        lambda: sampled_rows_24.sampled_rows_24(
            w(256, 64), X256, ids(256, 64), 64, config=sampled_rows_24.CANDIDATES[0]
        ),
    ),
    (
        "512 rows of a tile must divide the 128",
        lambda: scattered(hopper, 256, 128, 256, 128, config=scattered_matmul_24.CANDIDATES[0][0]),
    ),
]
X256, VENOM = jnp.zeros((256, 64), NARROW), random_venom_contiguous(256, 128, 64, 128, 64, NARROW, seed=0)


@pytest.mark.parametrize("message, call", OF_TILINGS)
def test_tilings_that_hopper_does_not_have(message, call):
    with pytest.raises(ValueError, match=message):
        call()
