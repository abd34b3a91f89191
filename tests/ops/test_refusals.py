"""Refusals of the public ops: each is one error, which names the operand and says what is allowed."""

import dataclasses
import functools
import re

import jax.numpy as jnp
import pytest

from sparse_lm import ops
from tests.ops import jitted
from tests.ops.operands import random_rows

pytestmark = pytest.mark.usefixtures("unchecked")

X = jnp.ones((8, 16))
W = jitted.sparsify_24(X)
A = jitted.sparsify_venom(X, 4, 4)
IDS = jnp.zeros((2, 4), jnp.int32)  # four neurons, or columns, for each of two blocks of four rows
SELECTED = jitted.sparsify_24(jnp.ones((4, 8)))

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
    ("a must be a SparseVenom", lambda a: ops.matmul_venom(a, X.T)),
    ("w must be a Sparse24", lambda w: ops.sampled_matmul_24(w, X, IDS, 4)),
    ("a must be a Sparse24", lambda a: ops.scattered_matmul_24(a, X, IDS, 4, 16)),
    ("w must be a Sparse24", lambda w: ops.sampled_squared_relu_24(w, X, IDS, 4)),
    ("y must be a Sparse24 or SparseVenom", lambda y: ops.squared_relu_gradients(X, y)),
    ("condensed must be a Sparse24", lambda c: ops.to_venom(c, IDS, 16, 4, 16)),
]
PRODUCTS = [  # with an operand [16, n], or transposed [n, 16]
    ("w", W, "b", functools.partial(ops.matmul_24, W)),
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
@pytest.mark.parametrize("shape, dtype", [((0, 8), float), ((8, 0), float), ((8,), float), ((8, 8), int)])
def test_what_is_no_matrix_of_floats(name, op, shape, dtype):
    x = jnp.ones(shape, jnp.dtype(dtype).name.replace("64", "32"))
    got = re.escape(f"{x.dtype}{list(shape)}")
    _refuses(f"{name} must be a matrix of floats, not empty; got {got}$", lambda: op(x))


@pytest.mark.parametrize("name, op", MATRICES)
def test_stacks_and_what_is_no_array(name, op):
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


def test_empty_sparse_operands():
    empty = dataclasses.replace(W, shape=(0, 16))
    _refuses(r"w \[0, 16\] and b \[16, 3\] must not be empty", lambda: ops.matmul_24(empty, jnp.ones((16, 3))))


@pytest.mark.parametrize("name, op", LISTS)
@pytest.mark.parametrize("shape, dtype", [((2, 4), "int16"), ((2, 4), "float32"), ((8,), "int32"), ((2, 0), "int32")])
def test_lists_that_are_none(name, op, shape, dtype):
    got = re.escape(f"{dtype}{list(shape)}")
    _refuses(f"^{name} must be a matrix of int32, not empty; got {got}", lambda: op(jnp.zeros(shape, dtype)))


@pytest.mark.parametrize(
    "message, call",
    [
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
        (
            "rows order 12 slots, not the 8 rows of a",
            lambda: ops.matmul_venom(A, X.T, rows=random_rows(10, 12, seed=0)),
        ),
        (r"dy \[8, 8\] must be \[8, 16\]", lambda: ops.squared_relu_gradients(jnp.ones((8, 8)), W)),
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
        ("v = 48 must divide 64", lambda: ops.compress_venom(jnp.ones((96, 4)), IDS, (96, 16), 48, 16)),
        ("v = 48 must divide 64", lambda: ops.to_venom(jitted.sparsify_24(jnp.ones((96, 4))), IDS, 16, 48, 16)),
        ("m = 6 must be a multiple of 4 that divides the 16 columns", lambda: ops.sparsify_venom(X, 8, 6)),
        ("m = 12 must be a multiple of 4 that divides the 16 columns", lambda: ops.sparsify_venom(X, 8, 12)),
        ("m = 12 must be a multiple of 4 that divides the 16 columns", lambda: ops.squared_relu_venom(X, 8, 12)),
    ],
)
def test_numbers_and_shapes_that_are_not_allowed(message, call):
    _refuses(message, call)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 1)])
def test_scales_that_do_not_share_out_the_rows(shape):
    message = "must be a list whose length divides the 10 rows"
    _refuses(message, lambda: ops.soft_threshold_24(jnp.ones((10, 8)), jnp.ones(shape)))


@pytest.mark.parametrize("shape", [(2, 8), (3, 4), (24,)])
def test_columns_that_do_not_fit_the_condensed_matrix(shape):
    columns, condensed = jnp.zeros(shape, jnp.int32), jnp.ones((10, 8))
    message = re.escape(f"columns {list(shape)} must be [3, 8], a list for each 4 of the 10 rows")
    _refuses(message, lambda: ops.compress_venom(condensed, columns, (10, 16), 4, 8))
    _refuses(message, lambda: ops.to_venom(jitted.sparsify_24(condensed), columns, 16, 4, 8))
    if shape == (2, 8):
        _refuses(message, lambda: ops.condense(jnp.ones((10, 16)), columns, 4))


@pytest.mark.parametrize(
    "name, call",
    [
        ("dtype", lambda: ops.sparsify_24(X, dtype=jnp.int32)),
        ("dtype", lambda: ops.sparsify_24_tiles(X, X > 0, dtype=jnp.int32)),
        ("dtype", lambda: ops.sparsify_venom(X, 8, 4, dtype=jnp.int32)),
        ("dtype", lambda: ops.soft_threshold_24(X, jnp.ones(1), dtype=jnp.int32)),
        ("dtype", lambda: ops.compress_24(X, X > 0, dtype=jnp.int32)),
        ("dtype", lambda: ops.compress_venom(X[:, :4], IDS, (8, 16), 4, 16, dtype=jnp.int32)),
        ("out_dtype", lambda: ops.matmul_24(W, X.T, out_dtype=jnp.int32)),
        ("out_dtype", lambda: ops.matmul_venom(A, X.T, out_dtype=jnp.int32)),
        ("out_dtype", lambda: ops.sampled_matmul_24(W, X, IDS, 4, out_dtype=jnp.int32)),
        ("out_dtype", lambda: ops.scattered_matmul_24(SELECTED, X, IDS, 4, 16, out_dtype=jnp.int32)),
    ],
)
def test_dtypes_of_results_that_are_no_floats(name, call):
    _refuses(f"^{name} = int32 must be a dtype of floats", call)
