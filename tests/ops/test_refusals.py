"""Ops and kernels refuse operands by one error, which names the operand and says what is allowed. Needs no GPU."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from sparse_lm import ops
from sparse_lm.ops import fp8, hopper, reference
from sparse_lm.ops.hopper.frame.compat import TRANSPOSES
from sparse_lm.ops.hopper.frame.tiling import Tiling
from tests.ops import jitted
from tests.ops.kernels import candidates, each_backend
from tests.ops.operands import random_24, random_columns, random_rows, random_venom

pytestmark = pytest.mark.usefixtures("unchecked")

X = jnp.ones((8, 16))
W, W4 = jitted.sparsify_24(X), jitted.sparsify_24(X[:, :4])
A = jitted.sparsify_venom(X, 4, 4)
HALF, X16 = X.astype(jnp.bfloat16), X.astype(jnp.float16)
IDS = jnp.zeros((2, 4), jnp.int32)  # four neurons, or columns, for each of two blocks of four rows
SELECTED = jitted.sparsify_24(jnp.ones((4, 8)))
X8 = X.astype(fp8.E4M3)
IN_FP8 = dataclasses.replace(W, values=W.values.astype(fp8.E4M3))
TARGETS, SCALE, SCALES = jnp.zeros(8, jnp.int32), jnp.ones(16), jnp.ones((8, 1))
KEY, GATED, Y24 = jax.random.key(0), jnp.ones((12, 12)), jitted.sparsify_24(jnp.ones((12, 6)))  # of 6 neurons
X12, Y12, W18, BLOCKS = jnp.ones((12, 5)), jnp.ones((12, 6)), jnp.ones((18, 5)), jnp.zeros(3, jnp.int32)  # of experts


def refuses(message, call, error=ValueError):
    with pytest.raises(error, match=message):
        call()


MATRICES = {
    "x": [
        ops.sparsify_24,
        lambda x: ops.sparsify_24_tiles(x, x),
        ops.sparsify_venom,
        ops.transposable_mask,
        lambda x: ops.compress_24(x, x),
        lambda x: ops.condense(x, IDS, 4),
        lambda x: ops.grouped_weights(Y12, x, BLOCKS, 4, 3),
    ],
    "w": [
        ops.soft_threshold_scale,
        lambda w: ops.soft_threshold_24(w, jnp.ones(1)),
        lambda w: ops.grouped_up(X12, w, BLOCKS, 4, 3),
    ],
    "h": [ops.squared_relu_24, ops.squared_relu_venom],
    "dy": [lambda dy: ops.squared_relu_gradients(dy, W)],
    "scale": [lambda scale: ops.matmul_24_fp8(IN_FP8, X.astype(fp8.E4M3), scale)],
}


@pytest.mark.parametrize("name, op", [(name, op) for name, calls in MATRICES.items() for op in calls])
def test_what_is_no_matrix_of_floats(name, op):
    for x in (jnp.ones((0, 8)), jnp.ones(8), jnp.ones((8, 8), jnp.int32)):
        got = re.escape(f"{x.dtype}{[*x.shape]}")
        refuses(f"{name} must be a matrix of floats, not empty; got {got}$", lambda x=x: op(x))
    refuses("use vmap for a stack of them", lambda: op(jnp.ones((2, 8, 16))))
    refuses(f"{name} must be an array; got Sparse24", lambda: op(W), TypeError)


FORMATS = [
    ("w must be a Sparse24", lambda w: ops.matmul_24(w, X.T)),
    ("a must be a Sparse24", lambda a: ops.matmul_24_fp8(a, X, SCALES)),
    ("a must be a SparseVenom", lambda a: ops.matmul_venom(a, X.T)),
    ("w must be a Sparse24", lambda w: ops.sampled_matmul_24(w, X, IDS, 4)),
    ("a must be a Sparse24", lambda a: ops.scattered_matmul_24(a, X, IDS, 4, 16)),
    ("y must be a Sparse24 or SparseVenom", lambda y: ops.squared_relu_gradients(X, y)),
    ("condensed must be a Sparse24", lambda c: ops.to_venom(c, IDS, 16, 4, 16)),
]


@pytest.mark.parametrize("message, op", FORMATS)
def test_other_formats(message, op):
    refuses(re.escape(f"{message}; got float32[8, 16]"), lambda: op(X), TypeError)
    refuses(f"{message}; got NoneType", lambda: op(None), TypeError)


LISTS_OF_NUMBERS = {
    "mask": lambda mask: ops.compress_24(X, mask),
    "targets": lambda targets: ops.cross_entropy(X, X, targets),
    "factor": lambda factor: ops.squared_relu_24(X, factor=factor),
}


@pytest.mark.parametrize("name, op", LISTS_OF_NUMBERS.items())
def test_lists_for_arrays(name, op):
    refuses(f"{name} must be an array; got list", lambda: op([[1.0]]), TypeError)


PRODUCTS = [  # with an operand [16, n], or transposed [n, 16]
    ("w", "b", functools.partial(ops.matmul_24, W)),
    ("a", "b_t^T", lambda b: ops.matmul_24_fp8(W, b.T, SCALES)),
    ("a", "b", functools.partial(ops.matmul_venom, A)),
    ("w", "x^T", lambda b: ops.sampled_matmul_24(W, b.T, IDS, 4)),
    ("a", "b", lambda b: ops.scattered_matmul_24(W, b, IDS, 4, 16)),
]


@pytest.mark.parametrize("left, right, product", PRODUCTS)
def test_operands_that_do_not_fit(left, right, product):
    shapes = f"{left} [8, 16] and {right}"
    refuses(re.escape(f"{shapes} [11, 8] cannot be multiplied"), lambda: product(jnp.ones((11, 8))))
    refuses(f"{right.removesuffix('^T')} must be .*, not empty; got", lambda: product(jnp.ones((16, 0))))
    refuses("must be a matrix of floats", lambda: product(jnp.ones((16, 8), jnp.int32)))


LISTS = [
    ("columns", lambda ids: ops.condense(X, ids, 4)),
    ("columns", lambda ids: ops.to_venom(W, ids, 16, 4, 4)),
    ("neuron_ids", lambda ids: ops.sampled_matmul_24(W, X, ids, 4)),
    ("neuron_ids", lambda ids: ops.scattered_matmul_24(SELECTED, X, ids, 4, 16)),
    ("a.columns", lambda ids: ops.matmul_venom(dataclasses.replace(A, columns=ids), X.T)),
    ("y.columns", lambda ids: ops.squared_relu_gradients(X, dataclasses.replace(A, columns=ids))),
]


ARRAYS = [
    ("scale", lambda scale: ops.soft_threshold_24(X, scale)),
    ("x", lambda x: ops.add_norm(x, None, SCALE, 1e-5)),
    ("update", lambda update: ops.add_norm(X, update, SCALE, 1e-5)),
    ("scale", lambda scale: ops.add_norm(X, None, scale, 1e-5)),
]


@pytest.mark.parametrize("name, op", ARRAYS)
def test_what_is_no_array_of_floats(name, op):
    refuses(f"{name} must be an array; got list", lambda: op([1.0]), TypeError)
    refuses(f"dtype of {name} = int32 must be a dtype of floats", lambda: op(jnp.ones((8, 16), jnp.int32)))
    refuses("must be", lambda: op(jnp.ones(())))


@pytest.mark.parametrize("name, op", LISTS)
def test_lists_that_are_none(name, op):
    for shape, dtype in (((2, 4), "int16"), ((8,), "int32"), ((2, 0), "int32")):
        got = re.escape(f"{dtype}{list(shape)}")
        message = f"^{name} must be a matrix of int32, not empty; got {got}"
        refuses(message, lambda shape=shape, dtype=dtype: op(jnp.zeros(shape, dtype)))


OTHERS = [
    (r"w \[0, 16\] and b \[16, 8\] must not be", lambda: ops.matmul_24(dataclasses.replace(W, shape=(0, 16)), X.T)),
    ("a row for each 4 of the 8 rows of x", lambda: ops.sampled_matmul_24(W, X, IDS[:1], 4)),
    ("a row for each 4 of the 8 columns of a", lambda: ops.scattered_matmul_24(SELECTED, X, IDS[:1], 4, 16)),
    (r"neuron_ids \[2, 3\] must list a neuron for", lambda: ops.scattered_matmul_24(SELECTED, X, IDS[:, :3], 4, 16)),
    ("v = 0 and contiguous = 1 must be positive", lambda: ops.sampled_matmul_24(W, X, IDS, 0)),
    ("contiguous = 3 must divide the 4 neurons", lambda: ops.sampled_matmul_24(W, X, IDS, 4, contiguous=3)),
    ("rows order 12 slots, not the 8 rows of a", lambda: ops.matmul_venom(A, X.T, rows=random_rows(10, 12, seed=0))),
    ("a is float32: must be float8_e4m3fn", lambda: ops.matmul_24_fp8(W, X.astype(fp8.E4M3), SCALES)),
    ("b_t is float32: must be float8_e4m3fn", lambda: ops.matmul_24_fp8(IN_FP8, X, SCALES)),
    (r"scale must be float32\[8, 1\].*; got float32\[4, 1\]", lambda: ops.matmul_24_fp8(IN_FP8, X8, SCALES[:4])),
    (r"scale must be float32\[8, 1\].*; got bfloat16", lambda: ops.matmul_24_fp8(IN_FP8, X8, HALF[:, :1])),
    (r"dy \[8, 8\] must be \[8, 16\]", lambda: ops.squared_relu_gradients(jnp.ones((8, 8)), W)),
    (r"factor float32\[8\] must be float32\[8, 1\]", lambda: ops.squared_relu_24(jnp.ones((8, 8)), factor=jnp.ones(8))),
    (r"columns must be float32\[1, 8\]", lambda: ops.matmul_24_fp8(IN_FP8, X8, SCALES, jnp.ones((1, 7)))),
    ("two columns a neuron", lambda: ops.gated_squared_relu_24(X[:, :15])),
    (r"must be \[T, F\] for h", lambda: ops.gated_squared_relu_gradients(X, X, W, key=jax.random.key(0))),
    (r"y \[12, 6\] must have a multiple of 4", lambda: ops.gated_squared_relu_gradients(Y12, GATED, Y24, key=KEY)),
    ("method = 'top_k' must be one of magnitude", lambda: ops.sparsify_24(X, "top_k")),
    ("axis = 1 must be -1 or 0", lambda: ops.sparsify_24(X, axis=1)),
    ("axis = -2 must be -1 or 0", lambda: ops.compress_24(X, X > 0, -2)),
    ("axis = 1 must be -1 or 0", lambda: ops.soft_threshold_scale(X, 1)),
    ("key must be one random key.* got NoneType", lambda: ops.sparsify_24(X, "mvue")),
    ("key must be one random key.* got NoneType", lambda: ops.hidden_gradients(X, X, "squared_relu", key=None)),
    (r"condensed \[8, 4\] must have 4 of each m = 4 of the 16 columns", lambda: ops.to_venom(W4, IDS, 16, 4, 4)),
    (r"key must be one random key, such as jax.random.key\(0\); got int", lambda: ops.sparsify_24(X, "mvue", key=7)),
    ("rows = 0 must be positive", lambda: ops.scattered_matmul_24(SELECTED, X, IDS, 4, 0)),
    ("m = 0 must be a multiple of 4 that divides the 16 columns", lambda: ops.to_venom(W4, IDS, 16, 4, 0)),
    ("contiguous = 3 must divide the 4 columns of a list", lambda: ops.to_venom(W4, IDS, 16, 4, 16, 3)),
    (r"mask must be bool\[8, 16\]; got bool\[16, 8\]", lambda: ops.sparsify_24_tiles(X, X.T > 0)),
    (r"mask must be bool\[8, 16\]; got float32\[8, 16\]", lambda: ops.sparsify_24_tiles(X, X)),
    (r"mask must be bool\[8, 16\]; got bool\[8, 1\]", lambda: ops.compress_24(X, X[:, :1] > 0)),
    (r"mask must be bool\[8, 16\]; got float32\[8, 16\]", lambda: ops.compress_24(X, X)),
    ("v = 48 must divide 64 or be a multiple of it", lambda: ops.sparsify_venom(X, 48, 4)),
    ("v = 0 must divide 64 or be a multiple of it", lambda: ops.squared_relu_venom(X, 0, 4)),
    ("v = 48 must divide 64", lambda: ops.to_venom(jitted.sparsify_24(jnp.ones((96, 4))), IDS, 16, 48, 16)),
    ("m = 6 must be a multiple of 4 that divides the 16 columns", lambda: ops.sparsify_venom(X, 8, 6)),
    ("m = 12 must be a multiple of 4 that divides the 16 columns", lambda: ops.squared_relu_venom(X, 8, 12)),
    ("a list whose length divides the 8 rows", lambda: ops.soft_threshold_24(X, jnp.ones(3))),
    (r"scale \[2\] must be \[1\] where axis = 0", lambda: ops.soft_threshold_24(X, jnp.ones(2), 0)),
    (r"columns \[2, 8\] must be \[4, 8\], a list for each 2 of the 8", lambda: ops.condense(X, IDS.repeat(2, 1), 2)),
    (r"columns \[2, 4\] must be \[2, 8\]", lambda: ops.to_venom(jitted.sparsify_24(X[:, :8]), IDS, 16, 4, 8)),
    ("^dtype = int32 must be a dtype of floats", lambda: ops.sparsify_24(X, dtype=jnp.int32)),
    ("^dtype = int32 must be a dtype of floats", lambda: ops.sparsify_venom(X, 8, 4, dtype=jnp.int32)),
    ("^out_dtype = int32 must be a dtype of floats", lambda: ops.matmul_24(W, X.T, out_dtype=jnp.int32)),
    ("cannot be multiplied", lambda: ops.cross_entropy(X, X[:, 1:], TARGETS)),
    ("one dtype, not float32 and bfloat16", lambda: ops.cross_entropy(X, HALF, TARGETS)),
    ("bfloat16 or float32, whose range odds need, not float16", lambda: ops.cross_entropy(X16, X16, TARGETS)),
    (r"targets must be int32\[8\].*; got int32\[7\]", lambda: ops.cross_entropy(X, X, TARGETS[1:])),
    ("classes must be in 1..8, the rows of w, not 9", lambda: ops.cross_entropy(X, X, TARGETS, 9)),
    (r"x must be \[..., D\], not a scalar and not empty", lambda: ops.add_norm(X[:0], None, SCALE, 1e-5)),
    ("activation = 'gelu' must be one of squared_relu, swiglu,", lambda: ops.hidden_gradients(X, X, "gelu", key=KEY)),
    ("x and update must be alike", lambda: ops.add_norm(X, X[:, 1:], SCALE, 1e-5)),
    (r"scale must be \[16\], a number for each column of x, not \[15\]", lambda: ops.add_norm(X, X, SCALE[1:], 1e-5)),
    (r"block_experts must be int32 \[12 / 3\]", lambda: ops.grouped_up(X12, W18, BLOCKS, 3, 3)),
    (r"x \[12, 6\] and w\[slice\]\^T \[5, 6\] cannot", lambda: ops.grouped_up(Y12, W18, BLOCKS, 4, 3)),
    (r"y \[12, 5\] and w\[slice\] \[6, 5\] cannot", lambda: ops.grouped_down(X12, W18, BLOCKS, 4, 3)),
    ("experts = 4 must divide the 18 rows", lambda: ops.grouped_up(X12, W18, BLOCKS, 4, 4)),
    ("tile_m must be 64, 128 or 256", lambda: Tiling(192, 128)),
    ("experts = 0 must be positive", lambda: ops.grouped_weights(Y12, X12, BLOCKS, 4, 0)),
    (r"y\^T \[6, 12\] and x \[8, 5\] cannot", lambda: ops.grouped_weights(Y12, X12[:8], BLOCKS[:2], 4, 3)),
]


# Kernels.

WIDE, NARROW = jnp.float32, jnp.bfloat16
H = jnp.zeros((64, 64), NARROW)
RBG = jax.random.key(0, impl="rbg")


def w(rows, columns, dtype=NARROW):
    return random_24(rows, columns, dtype, seed=0)


def ids(tokens, v):
    return random_columns(-(-tokens // v), 128, 256, seed=2)


@functools.cache
def y():
    return reference.squared_relu_24(H)[0]


def scattered(backend, tokens, v, rows, contiguous, **options):
    b, neuron_ids = jnp.zeros((tokens, 64), NARROW), jnp.arange(128)[None].repeat(-(-tokens // v), axis=0)
    return backend.scattered_matmul_24(w(128, tokens), b, neuron_ids, v, rows, contiguous=contiguous, **options)


def widest(backend):
    return candidates(backend.__name__.rpartition(".")[2], "scattered_matmul_24")[0]


BY_KERNELS = [
    ("bfloat16", lambda b: b.matmul_24(w(64, 64, WIDE), H.astype(WIDE), out_dtype=WIDE)),
    ("bfloat16", lambda b: b.matmul_24(w(64, 64), H.astype(jnp.float16))),
    ("multiple of 64", lambda b: b.matmul_venom(random_venom(64, 64, 32, 16, NARROW, seed=0), H)),
    ("v .* 96", lambda b: b.sampled_matmul_24(w(64, 64), H, ids(64, 96), 96)),
    ("multiple", lambda b: scattered(b, 128, 64, 256, 32)),
    ("multiple", lambda b: scattered(b, 128, 96, 256, 128)),
    ("rows = 200 must be a multiple of 128", lambda b: scattered(b, 128, 64, 200, 128)),
    ("contiguous = 128 must be .* (256|512)", lambda b: scattered(b, 128, 64, 256, 128, config=widest(b))),
    ("16-bit", lambda b: b.sparsify_24(H, "magnitude", -1, dtype=WIDE)),
    ("float16", lambda b: b.squared_relu_24(H.astype(WIDE))),
    ("threefry2x32, not of rbg", lambda b: b.sparsify_24(H, "mvue", -1, key=RBG, dtype=NARROW)),
    ("threefry2x32, not of rbg", lambda b: b.squared_relu_gradients(H, y(), key=RBG)),
    ("rows of a scale = 96", lambda b: b.soft_threshold_24(jnp.zeros((192, 64)), jnp.ones(2), -1, dtype=NARROW)),
]


@each_backend
@pytest.mark.parametrize("message, call", BY_KERNELS)
def test_no_kernel_takes(message, call, backend):
    refuses(message, lambda: call(backend), NotImplementedError)


def cross_entropy(tokens, dim, vocabulary, dtype=NARROW):
    x, of_classes = jnp.zeros((tokens, dim), dtype), jnp.zeros((vocabulary, dim), dtype)
    return hopper.cross_entropy(x, of_classes, jnp.zeros(tokens, jnp.int32), vocabulary)


def add_norm(width, dtype=NARROW):
    return hopper.add_norm(jnp.zeros((4, width), dtype), None, jnp.ones(width), 1e-5)


def matmul_24_fp8(k, out_dtype=NARROW):
    b_t = jnp.zeros((64, k), fp8.E4M3)
    return hopper.matmul_24_fp8(w(64, k, fp8.E4M3), b_t, jnp.ones((64, 1)), out_dtype=out_dtype)


def grouped_up(v):
    return hopper.grouped_up(jnp.zeros((384, 256), NARROW), jnp.zeros((768, 256), NARROW), jnp.arange(6), v, 3)


BY_HOPPER = [
    ("K = 192 must be a multiple of 128", lambda: matmul_24_fp8(192)),
    ("gives bfloat16 or float32, not float16", lambda: matmul_24_fp8(256, jnp.float16)),
    ("D = 8448 must be at most 8192", lambda: add_norm(8448)),
    ("D = 320 must be a multiple of 256", lambda: add_norm(320)),
    ("takes bfloat16 or float16 throughout, not float32", lambda: add_norm(256, WIDE)),
    ("T = 192 must be a multiple of 128", lambda: cross_entropy(192, 256, 512)),
    ("V = 384 must be a multiple of 256", lambda: cross_entropy(128, 256, 384)),
    ("D = 320 must be a multiple of 256", lambda: cross_entropy(128, 320, 512)),
    ("takes bfloat16, not float32", lambda: cross_entropy(128, 256, 512, WIDE)),
    ("v = 64 must be a multiple of 128", lambda: grouped_up(64)),
    ("contiguous", lambda: hopper.squared_relu_gradients(H, random_venom(64, 128, 64, 8, NARROW, 0, contiguous=64))),
    ("v to be a multiple of 64", lambda: hopper.squared_relu_venom(jnp.zeros((96, 768), NARROW), 96, 16)),
    (", m ", lambda: hopper.squared_relu_venom(jnp.zeros((64, 768), NARROW), 64, 12)),
    ("multiple of 128", lambda: scattered(hopper, 128, 64, 256, 64)),
    ("more than 64 columns", lambda: scattered(hopper, 64, 64, 256, 128)),
]
if TRANSPOSES:  # else it is refused for the JAX that there is
    BY_HOPPER += [
        ("takes bfloat16, not float32", lambda: hopper.fp8_rows(jnp.zeros((64, 256), WIDE))),
        ("T = 48 must be a multiple of 32", lambda: hopper.fp8_rows(jnp.zeros((48, 256), NARROW))),
        ("N = 192 to be a multiple of 128", lambda: hopper.fp8_rows(jnp.zeros((64, 192), NARROW))),
        ("128 times 2, 4 or 8", lambda: hopper.fp8_rows(jnp.zeros((64, 128 * 17), NARROW))),
    ]


@pytest.mark.parametrize("message, call", BY_HOPPER)
def test_hopper_takes_no(message, call):
    refuses(message, call, NotImplementedError)


@pytest.mark.parametrize("message, call", OTHERS)
def test_numbers_shapes_dtypes_and_tilings_that_are_not_allowed(message, call):
    refuses(message, call)
