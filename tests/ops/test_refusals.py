"""Refusals of the public ops: each is one error, which names the operand and says what is allowed."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from sparse_lm import ops
from tests.ops import jitted
from tests.ops.operands import random_rows

pytestmark = pytest.mark.usefixtures("unchecked")

X = jnp.ones((8, 16))
W = jitted.sparsify_24(X)
A = jitted.sparsify_venom(X, 4, 4)
HALF, X16 = X.astype(jnp.bfloat16), X.astype(jnp.float16)
IDS = jnp.zeros((2, 4), jnp.int32)  # four neurons, or columns, for each of two blocks of four rows
SELECTED = jitted.sparsify_24(jnp.ones((4, 8)))
TARGETS, SCALE = jnp.zeros(8, jnp.int32), jnp.ones(16)
X12, Y12, W18, BLOCKS = jnp.ones((12, 5)), jnp.ones((12, 6)), jnp.ones((18, 5)), jnp.zeros(3, jnp.int32)  # of experts

MATRICES = [
    ("x", ops.sparsify_24),
    ("x", lambda x: ops.sparsify_24_tiles(x, x)),
    ("x", ops.sparsify_venom),
    ("x", ops.transposable_mask),
    ("x", lambda x: ops.compress_24(x, x)),
    ("x", lambda x: ops.condense(x, IDS, 4)),
    ("condensed", lambda x: ops.compress_venom(x, IDS, (8, 16), 4, 16)),
    ("w", ops.soft_threshold_scale),
    ("w", lambda w: ops.soft_threshold_24(w, jnp.ones(1))),
    ("h", ops.squared_relu_24),
    ("h", ops.squared_relu_venom),
    ("dy", lambda dy: ops.squared_relu_gradients(dy, W)),
]
FORMATS = [
    ("w must be a Sparse24", lambda w: ops.matmul_24(w, X.T)),
    ("a must be a Sparse24", lambda a: ops.matmul_24_fp8(a, X, jnp.ones((8, 1)))),
    ("a must be a SparseVenom", lambda a: ops.matmul_venom(a, X.T)),
    ("w must be a Sparse24", lambda w: ops.sampled_matmul_24(w, X, IDS, 4)),
    ("a must be a Sparse24", lambda a: ops.scattered_matmul_24(a, X, IDS, 4, 16)),
    ("w must be a Sparse24", lambda w: ops.sampled_squared_relu_24(w, X, IDS, 4)),
    ("y must be a Sparse24 or SparseVenom", lambda y: ops.squared_relu_gradients(X, y)),
    ("condensed must be a Sparse24", lambda c: ops.to_venom(c, IDS, 16, 4, 16)),
]
PRODUCTS = [  # with an operand [16, n], or transposed [n, 16]
    ("w", W, "b", functools.partial(ops.matmul_24, W)),
    ("a", W, "b_t^T", lambda b: ops.matmul_24_fp8(W, b.T, jnp.ones((8, 1)))),
    ("a", A, "b", functools.partial(ops.matmul_venom, A)),
    ("w", W, "x^T", lambda b: ops.sampled_matmul_24(W, b.T, IDS, 4)),
    ("w", W, "x^T", lambda b: ops.sampled_squared_relu_24(W, b.T, IDS, 4)),
    ("a", W, "b", lambda b: ops.scattered_matmul_24(W, b, IDS, 4, 16)),
]
LISTS = [
    ("neuron_ids", lambda ids: ops.sampled_matmul_24(W, X, ids, 4)),
    ("neuron_ids", lambda ids: ops.sampled_squared_relu_24(W, X, ids, 4)),
    ("neuron_ids", lambda ids: ops.scattered_matmul_24(SELECTED, X, ids, 4, 16)),
    ("a.columns", lambda ids: ops.matmul_venom(dataclasses.replace(A, columns=ids), X.T)),
]


def _refuses(message, call, error=ValueError):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name, op", MATRICES)
def test_what_is_no_matrix_of_floats(name, op):
    for x in (jnp.ones((0, 8)), jnp.ones((8, 0)), jnp.ones(8), jnp.ones((8, 8), jnp.int32)):
        got = re.escape(f"{x.dtype}{[*x.shape]}")
        _refuses(f"{name} must be a matrix of floats, not empty; got {got}$", lambda x=x: op(x))
    _refuses("use vmap for a stack of them", lambda: op(jnp.ones((2, 8, 16))))
    _refuses(f"{name} must be an array; got Sparse24", lambda: op(W), TypeError)


@pytest.mark.parametrize("message, op", FORMATS)
def test_other_formats(message, op):
    _refuses(re.escape(f"{message}; got float32[8, 16]"), lambda: op(X), TypeError)
    _refuses(f"{message}; got NoneType", lambda: op(None), TypeError)


@pytest.mark.parametrize("left, sparse, right, product", PRODUCTS)
def test_operands_that_do_not_fit(left, sparse, right, product):
    shapes = f"{left} {list(sparse.shape)} and {right}"
    _refuses(re.escape(f"{shapes} [11, 8] cannot be multiplied"), lambda: product(jnp.ones((11, 8))))
    _refuses(re.escape(f"{shapes} [16] cannot be multiplied"), lambda: product(jnp.ones(16)))
    _refuses(re.escape(f"{shapes} [16, 0] must not be empty"), lambda: product(jnp.ones((16, 0))))
    _refuses("must be a matrix of floats", lambda: product(jnp.ones((16, 8), jnp.int32)))


@pytest.mark.parametrize("name, op", LISTS)
def test_lists_that_are_none(name, op):
    for shape, dtype in (((2, 4), "int16"), ((8,), "int32"), ((2, 0), "int32")):
        got = re.escape(f"{dtype}{list(shape)}")
        message = f"^{name} must be a matrix of int32, not empty; got {got}"
        _refuses(message, lambda shape=shape, dtype=dtype: op(jnp.zeros(shape, dtype)))


OTHERS = [
    (r"w \[0, 16\] and b \[16, 8\] must not be", lambda: ops.matmul_24(dataclasses.replace(W, shape=(0, 16)), X.T)),
    ("a row for each 4 of the 8 rows of x", lambda: ops.sampled_matmul_24(W, X, IDS[:1], 4)),
    ("a row for each 16 of the 8 rows of x", lambda: ops.sampled_squared_relu_24(W, X, IDS, 16)),
    ("a row for each 4 of the 8 columns of a", lambda: ops.scattered_matmul_24(SELECTED, X, IDS[:1], 4, 16)),
    (
        r"neuron_ids \[2, 3\] must list a neuron for each of the 4 rows of a",
        lambda: ops.scattered_matmul_24(SELECTED, X, IDS[:, :3], 4, 16),
    ),
    ("v = 0 and contiguous = 1 must be positive", lambda: ops.sampled_matmul_24(W, X, IDS, 0)),
    ("v = 4 and contiguous = 0 must be positive", lambda: ops.sampled_matmul_24(W, X, IDS, 4, contiguous=0)),
    ("contiguous = 3 must divide the 4 neurons", lambda: ops.sampled_matmul_24(W, X, IDS, 4, contiguous=3)),
    ("rows order 12 slots, not the 8 rows of a", lambda: ops.matmul_venom(A, X.T, rows=random_rows(10, 12, seed=0))),
    (r"dy \[8, 8\] must be \[8, 16\]", lambda: ops.squared_relu_gradients(jnp.ones((8, 8)), W)),
    ("two columns a neuron", lambda: ops.gated_squared_relu_24(X[:, :15])),
    (r"must be \[T, F\] for h", lambda: ops.gated_squared_relu_gradients(X, X, W, key=jax.random.key(0))),
    ("method = 'top_k' must be one of magnitude", lambda: ops.sparsify_24(X, "top_k")),
    ("axis = 1 must be -1 or 0", lambda: ops.sparsify_24(X, axis=1)),
    ("axis = -2 must be -1 or 0", lambda: ops.compress_24(X, X > 0, -2)),
    ("axis = 1 must be -1 or 0", lambda: ops.soft_threshold_scale(X, 1)),
    ("key must be given", lambda: ops.sparsify_24(X, "mvue")),
    (r"mask bool\[16, 8\] must be bool\[8, 16\]", lambda: ops.sparsify_24_tiles(X, X.T > 0)),
    (r"mask float32\[8, 16\] must be bool\[8, 16\]", lambda: ops.sparsify_24_tiles(X, X)),
    (r"mask \[8, 1\] must have the shape of x, \[8, 16\]", lambda: ops.compress_24(X, X[:, :1] > 0)),
    ("v = 48 must divide 64 or be a multiple of it", lambda: ops.sparsify_venom(X, 48, 4)),
    ("v = 0 must divide 64 or be a multiple of it", lambda: ops.squared_relu_venom(X, 0, 4)),
    ("v = 48 must divide 64", lambda: ops.to_venom(jitted.sparsify_24(jnp.ones((96, 4))), IDS, 16, 48, 16)),
    ("m = 6 must be a multiple of 4 that divides the 16 columns", lambda: ops.sparsify_venom(X, 8, 6)),
    ("m = 12 must be a multiple of 4 that divides the 16 columns", lambda: ops.squared_relu_venom(X, 8, 12)),
    ("a list whose length divides the 8 rows", lambda: ops.soft_threshold_24(X, jnp.ones(()))),
    ("a list whose length divides the 8 rows", lambda: ops.soft_threshold_24(X, jnp.ones(3))),
    (r"columns \[2, 8\] must be \[4, 8\], a list for each 2 of the 8", lambda: ops.condense(X, IDS.repeat(2, 1), 2)),
    (r"columns \[2, 4\] must be \[2, 8\]", lambda: ops.compress_venom(X[:, :8], IDS, (8, 16), 4, 8)),
    (r"columns \[2, 4\] must be \[2, 8\]", lambda: ops.to_venom(jitted.sparsify_24(X[:, :8]), IDS, 16, 4, 8)),
    ("^dtype = int32 must be a dtype of floats", lambda: ops.sparsify_24(X, dtype=jnp.int32)),
    ("^dtype = int32 must be a dtype of floats", lambda: ops.sparsify_venom(X, 8, 4, dtype=jnp.int32)),
    ("^out_dtype = int32 must be a dtype of floats", lambda: ops.matmul_24(W, X.T, out_dtype=jnp.int32)),
    ("cannot be multiplied", lambda: ops.cross_entropy(X, X[:, 1:], TARGETS)),
    ("one dtype, not float32 and bfloat16", lambda: ops.cross_entropy(X, HALF, TARGETS)),
    ("bfloat16 or float32, whose range odds need, not float16", lambda: ops.cross_entropy(X16, X16, TARGETS)),
    (
        r"targets must be int32\[8\], one for each row of x; got int32\[7\]",
        lambda: ops.cross_entropy(X, X, TARGETS[1:]),
    ),
    ("classes must be in 1..8, the rows of w, not 0", lambda: ops.cross_entropy(X, X, TARGETS, 0)),
    ("classes must be in 1..8, the rows of w, not 9", lambda: ops.cross_entropy(X, X, TARGETS, 9)),
    (
        r"x and update must be alike, not float32\[8, 16\] and float32\[8, 15\]",
        lambda: ops.add_norm(X, X[:, 1:], SCALE, 1e-5),
    ),
    (r"scale must be \[16\], a number for each column of x, not \[15\]", lambda: ops.add_norm(X, X, SCALE[1:], 1e-5)),
    (r"block_experts must be int32 \[12 / 3\]", lambda: ops.grouped_up(X12, W18, BLOCKS, 3, 3)),
    ("do not fit weights that contract 6", lambda: ops.grouped_down(X12, W18, BLOCKS, 4, 3)),
    ("experts = 4 must divide the 18 rows", lambda: ops.grouped_up(X12, W18, BLOCKS, 4, 4)),
    ("y has 12 tokens and x 8", lambda: ops.grouped_weights(Y12, X12[:8], BLOCKS[:2], 4, 3)),
]


@pytest.mark.parametrize("message, call", OTHERS)
def test_numbers_shapes_and_dtypes_that_are_not_allowed(message, call):
    _refuses(message, call)
