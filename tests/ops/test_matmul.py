import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import reference
from tests.ops import jitted
from tests.ops.operands import random_rows

DTYPES = [jnp.float32, jnp.bfloat16]


def _random(shape, dtype, seed):
    return jnp.array(np.random.default_rng(seed).normal(size=shape), dtype)


def _check(product, *operands, exact, dtype):
    """The product is `exact`, accumulated in float32 and rounded once, to the operands' dtype or to float32."""
    both = jax.jit(lambda *operands: (product(*operands), product(*operands, out_dtype=jnp.float32)))
    for result, result_dtype in zip(both(*operands), (dtype, jnp.float32), strict=True):
        assert result.dtype == result_dtype
        rounding = float(jnp.finfo(result_dtype).eps) / 2
        np.testing.assert_allclose(_float64(result), exact, rtol=rounding, atol=2e-5)


def _float64(x):
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, k, n", [(64, 128, 32), (33, 52, 7), (5, 6, 1)])
@pytest.mark.parametrize("out_transposed", [False, True])
def test_matmul_24(m, k, n, out_transposed, dtype):
    w = jitted.sparsify_24(_random((m, k), dtype, 0))
    b = _random((k, n), dtype, 1)
    exact = _float64(jitted.dense(w)) @ _float64(b)
    product = functools.partial(ops.matmul_24, out_transposed=out_transposed)
    _check(product, w, b, exact=exact.T if out_transposed else exact, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, n, v, m", [((128, 64), 24, 64, 16), ((37, 60), 10, 16, 12), ((70, 32), 5, 32, 4)])
def test_matmul_venom(shape, n, v, m, dtype):
    a = jitted.sparsify_venom(_random(shape, dtype, 2), v, m)
    b = _random((shape[1], n), dtype, 3)
    _check(ops.matmul_venom, a, b, exact=_float64(jitted.dense(a)) @ _float64(b), dtype=dtype)


@pytest.mark.parametrize("padding", [0, 22])
def test_matmul_venom_puts_rows_back_in_the_order_of_the_tokens(padding):
    tokens, v = 50, 8
    rows = random_rows(tokens, tokens + padding, seed=11)
    slots = np.asarray(rows.slots)
    a, b = jitted.sparsify_venom(_random((len(slots), 32), jnp.float32, 12), v, 8), _random((32, 5), jnp.float32, 13)
    exact = np.zeros((tokens, 5))
    has_token = slots < tokens
    exact[slots[has_token]] = (_float64(jitted.dense(a)) @ _float64(b))[has_token]
    product = functools.partial(ops.matmul_venom, rows=rows)
    _check(product, a, b, exact=exact, dtype=jnp.float32)
    with pytest.raises(ValueError, match=f"order {len(slots)} slots, not the 40 rows"):
        product(jitted.sparsify_venom(jnp.ones((40, 32)), v, 8), b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, dim, neurons, kept, v", [(64, 32, 48, 12, 32), (37, 20, 30, 7, 16)])
def test_sampled_matmul_24(tokens, dim, neurons, kept, v, dtype):
    w = jitted.sparsify_24(_random((neurons, dim), dtype, 4))
    x = _random((tokens, dim), dtype, 5)
    columns = np.random.default_rng(6).integers(neurons + 1, size=(-(-tokens // v), kept)).astype(np.int32)
    every = np.pad(_float64(x) @ _float64(jitted.dense(w)).T, ((0, 0), (0, 1)))  # neuron F gives zeros
    exact = np.take_along_axis(every, columns[np.arange(tokens) // v], axis=1)
    _check(functools.partial(ops.sampled_matmul_24, v=v), w, x, columns, exact=exact, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, dim, neurons, contiguous, kept, v", [(64, 32, 48, 8, 16, 32), (37, 20, 30, 1, 7, 16)])
def test_scattered_matmul_24_is_the_sum_over_blocks(tokens, dim, neurons, contiguous, kept, v, dtype):
    rng = np.random.default_rng(8)
    a, b = jitted.sparsify_24(_random((kept, tokens), dtype, 9)), _random((tokens, dim), dtype, 10)
    runs = np.stack([rng.permutation(neurons // contiguous)[: kept // contiguous] for _ in range(-(-tokens // v))])
    columns = (contiguous * runs[..., None] + np.arange(contiguous)).reshape(len(runs), kept).astype(np.int32)
    exact = np.zeros((neurons, dim))
    for block, listed in enumerate(columns):
        slots = slice(block * v, min((block + 1) * v, tokens))
        exact[listed] += _float64(jitted.dense(a))[:, slots] @ _float64(b)[slots]
    scattered = functools.partial(ops.scattered_matmul_24, neuron_ids=columns, v=v, rows=neurons, contiguous=contiguous)
    _check(scattered, a, b, exact=exact, dtype=dtype)


def test_neurons_that_are_none_are_left_out():
    a, b = jitted.sparsify_24(_random((4, 8), jnp.float32, 9)), _random((8, 5), jnp.float32, 10)
    columns = np.array([[6, 5, 1, 6], [2, 6, 5, 3]], np.int32)  # 6: none
    exact = np.zeros((7, 5))
    for block, listed in enumerate(columns):
        slots = slice(4 * block, 4 * block + 4)
        exact[listed] += _float64(jitted.dense(a))[:, slots] @ _float64(b)[slots]
    scattered = jax.jit(ops.scattered_matmul_24, static_argnums=(3, 4))(a, b, columns, 4, 6)
    np.testing.assert_allclose(scattered, exact[:6], rtol=1e-5, atol=1e-5)


def test_what_listed_columns_must_be():
    w, x = jitted.sparsify_24(_random((16, 8), jnp.float32, 0)), _random((10, 8), jnp.float32, 1)
    with pytest.raises(ValueError, match="a row for each 4 of the 10 rows of x"):
        ops.sampled_matmul_24(w, x, jnp.zeros((2, 4), jnp.int32), 4)
    with pytest.raises(ValueError, match="v = 0 and contiguous = 1 must be positive"):
        ops.sampled_matmul_24(w, x, jnp.zeros((3, 4), jnp.int32), 0)
    with pytest.raises(ValueError, match="v = 4 and contiguous = 0 must be positive"):
        ops.sampled_matmul_24(w, x, jnp.zeros((3, 4), jnp.int32), 4, contiguous=0)
    with pytest.raises(ValueError, match="contiguous = 3 must divide the 4 neurons"):
        ops.sampled_matmul_24(w, x, jnp.zeros((3, 4), jnp.int32), 4, contiguous=3)


def test_blocks_may_be_taken_a_few_at_a_time(monkeypatch):
    a = jitted.sparsify_venom(_random((104, 64), jnp.float32, 7), 8, 8)
    b = _random((64, 16), jnp.float32, 8)
    at_once = jax.jit(lambda: ops.matmul_venom(a, b))()
    monkeypatch.setattr(reference, "_GATHERED_ELEMENTS", 3 * 32 * 16)  # three of 13 blocks
    a_few = jax.jit(lambda: ops.matmul_venom(a, b))()
    for whole, parts in zip(at_once, a_few, strict=True):
        np.testing.assert_allclose(whole, parts, rtol=1e-6, atol=1e-6)


def test_accumulation_is_in_float32():
    k = 4096

    @jax.jit
    def add_up(ones):
        w = ops.sparsify_24(ones.T, "magnitude")
        return ops.matmul_24(w, ones, out_dtype=jnp.float32)

    assert add_up(jnp.ones((k, 1), jnp.bfloat16)) == k // 2  # a bfloat16 accumulator stops at 256


def test_stacks_go_through_jit_and_vmap():
    w, a, b = (_random((2, 40, 32), jnp.float32, seed) for seed in (11, 12, 13))
    b = b.mT

    def products(w, a, b):
        w, a = ops.sparsify_24(w), ops.sparsify_venom(a, 16, 8)
        return ops.matmul_24(w, b), ops.matmul_venom(a, b), ops.sampled_matmul_24(w, b.T, a.columns[:3, :16], 16)

    both, one = jax.jit(jax.vmap(products))(w, a, b), jax.jit(products)
    for layer in range(2):
        for stacked, single in zip(both, one(w[layer], a[layer], b[layer]), strict=True):
            np.testing.assert_allclose(stacked[layer], single, rtol=1e-5, atol=1e-5)


def test_shapes_that_do_not_match_are_refused():
    w, a = jitted.sparsify_24(jnp.ones((8, 12))), jitted.sparsify_venom(jnp.ones((8, 12)), 4, 4)
    with pytest.raises(ValueError, match=r"w \[8, 12\] and b \[8, 3\] cannot be multiplied"):
        ops.matmul_24(w, jnp.ones((8, 3)))
    with pytest.raises(ValueError, match=r"w \[8, 12\] and b \[12, 3, 2\] cannot be multiplied"):
        ops.matmul_24(w, jnp.ones((12, 3, 2)))
    with pytest.raises(ValueError, match=r"a \[8, 12\] and b \[11, 3\] cannot be multiplied"):
        ops.matmul_venom(a, jnp.ones((11, 3)))
    with pytest.raises(ValueError, match=r"w \[8, 12\] and x\^T \[11, 5\] cannot be multiplied"):
        ops.sampled_matmul_24(w, jnp.ones((5, 11)), jnp.zeros((2, 4), jnp.int32), 4)
    with pytest.raises(ValueError, match="must have a row for each 4 of the 5 rows of x"):
        ops.sampled_matmul_24(w, jnp.ones((5, 12)), jnp.zeros((1, 4), jnp.int32), 4)
    with pytest.raises(ValueError, match=r"neuron_ids \[3, 4\] must list a neuron for each of the 8 rows of a"):
        ops.scattered_matmul_24(w, jnp.ones((12, 3)), jnp.zeros((3, 4), jnp.int32), 4, 16)


@pytest.mark.parametrize(
    "columns, got",
    [
        (jnp.zeros((2, 4), jnp.int16), "int16[2, 4]"),
        (jnp.zeros((2, 4)), "float32[2, 4]"),
        (jnp.zeros(8, jnp.int32), "int32[8]"),
        (jnp.zeros((2, 0), jnp.int32), "int32[2, 0]"),
    ],
)
def test_neuron_ids_that_are_no_lists_are_refused(columns, got):
    w, x = jitted.sparsify_24(jnp.ones((16, 8))), jnp.ones((8, 8))
    a, a_t = jitted.sparsify_venom(jnp.ones((8, 16)), 4, 4), jitted.sparsify_24(jnp.ones((4, 8)))
    for name, product in (
        ("neuron_ids", lambda: ops.sampled_matmul_24(w, x, columns, 4)),
        ("neuron_ids", lambda: ops.sampled_squared_relu_24(w, x, columns, 4)),
        ("neuron_ids", lambda: ops.sampled_squared_relu_venom(w, x, columns, 4, 4, 4)),
        ("neuron_ids", lambda: ops.scattered_matmul_24(a_t, x, columns, 4, 16)),
        ("a.columns", lambda: ops.matmul_venom(dataclasses.replace(a, columns=columns), jnp.ones((16, 3)))),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be a matrix of int32, not empty; got {re.escape(got)}"):
            product()


def test_empty_operands_are_refused():
    w, a = jitted.sparsify_24(jnp.ones((8, 12))), jitted.sparsify_venom(jnp.ones((8, 12)), 4, 4)
    columns = jnp.zeros((2, 8), jnp.int32)
    with pytest.raises(ValueError, match=r"w \[8, 12\] and b \[12, 0\] must not be empty"):
        ops.matmul_24(w, jnp.ones((12, 0)))
    with pytest.raises(ValueError, match=r"w \[0, 12\] and b \[12, 3\] must not be empty"):
        ops.matmul_24(dataclasses.replace(w, shape=(0, 12)), jnp.ones((12, 3)))
    with pytest.raises(ValueError, match=r"a \[8, 12\] and b \[12, 0\] must not be empty"):
        ops.matmul_venom(a, jnp.ones((12, 0)))
    with pytest.raises(ValueError, match=r"w \[8, 12\] and x\^T \[12, 0\] must not be empty"):
        ops.sampled_matmul_24(w, jnp.ones((0, 12)), columns, 4)
    with pytest.raises(ValueError, match=r"a \[8, 12\] and b \[12, 0\] must not be empty"):
        ops.scattered_matmul_24(w, jnp.ones((12, 0)), columns, 6, 16)
