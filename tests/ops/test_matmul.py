import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import reference
from tests.ops import jitted
from tests.ops.operands import random, random_contiguous, random_rows

DTYPES = [jnp.float32, jnp.bfloat16]


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
    w = jitted.sparsify_24(random((m, k), dtype, 0))
    b = random((k, n), dtype, 1)
    exact = _float64(jitted.dense(w)) @ _float64(b)
    product = functools.partial(ops.matmul_24, out_transposed=out_transposed)
    _check(product, w, b, exact=exact.T if out_transposed else exact, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, n, v, m", [((128, 64), 24, 64, 16), ((37, 60), 10, 16, 12), ((70, 32), 5, 32, 4)])
def test_matmul_venom(shape, n, v, m, dtype):
    a = jitted.sparsify_venom(random(shape, dtype, 2), v, m)
    b = random((shape[1], n), dtype, 3)
    _check(ops.matmul_venom, a, b, exact=_float64(jitted.dense(a)) @ _float64(b), dtype=dtype)


@pytest.mark.parametrize("padding", [0, 22])
def test_matmul_venom_puts_rows_back_in_the_order_of_the_tokens(padding):
    tokens, v = 50, 8
    rows = random_rows(tokens, tokens + padding, seed=11)
    slots = np.asarray(rows.slots)
    a, b = jitted.sparsify_venom(random((len(slots), 32), jnp.float32, 12), v, 8), random((32, 5), jnp.float32, 13)
    exact = np.zeros((tokens, 5))
    has_token = slots < tokens
    exact[slots[has_token]] = (_float64(jitted.dense(a)) @ _float64(b))[has_token]
    product = functools.partial(ops.matmul_venom, rows=rows)
    _check(product, a, b, exact=exact, dtype=jnp.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, dim, neurons, kept, v", [(64, 32, 48, 12, 32), (37, 20, 30, 7, 16)])
def test_sampled_matmul_24(tokens, dim, neurons, kept, v, dtype):
    w = jitted.sparsify_24(random((neurons, dim), dtype, 4))
    x = random((tokens, dim), dtype, 5)
    neuron_ids = np.random.default_rng(6).integers(neurons + 1, size=(-(-tokens // v), kept))
    every = np.pad(_float64(x) @ _float64(jitted.dense(w)).T, ((0, 0), (0, 1)))  # neuron F gives zeros
    exact = np.take_along_axis(every, neuron_ids[np.arange(tokens) // v], axis=1)
    _check(functools.partial(ops.sampled_matmul_24, v=v), w, x, jnp.asarray(neuron_ids), exact=exact, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, dim, neurons, contiguous, kept, v", [(64, 32, 48, 8, 16, 32), (37, 20, 30, 1, 7, 16)])
def test_scattered_matmul_24_is_the_sum_over_blocks(tokens, dim, neurons, contiguous, kept, v, dtype):
    a, b = jitted.sparsify_24(random((kept, tokens), dtype, 9)), random((tokens, dim), dtype, 10)
    neuron_ids = random_contiguous(-(-tokens // v), kept, contiguous, neurons, seed=8)
    scattered = functools.partial(ops.scattered_matmul_24, v=v, rows=neurons, contiguous=contiguous)
    exact = _scattered(a, b, neuron_ids, v, neurons)
    _check(lambda a, b, **options: scattered(a, b, neuron_ids, **options), a, b, exact=exact, dtype=dtype)


def _scattered(a, b, neuron_ids, v, rows):
    exact = np.zeros((rows, b.shape[1]))
    for block, ids in enumerate(np.asarray(neuron_ids)):
        slots = slice(v * block, v * block + v)
        exact[ids] += _float64(jitted.dense(a))[:, slots] @ _float64(b)[slots]
    return exact


def test_neurons_that_are_none_are_left_out():
    a, b = jitted.sparsify_24(random((4, 8), jnp.float32, 9)), random((8, 5), jnp.float32, 10)
    neuron_ids = jnp.array([[6, 5, 1, 6], [2, 6, 5, 3]], jnp.int32)  # 6: none
    scattered = jax.jit(ops.scattered_matmul_24, static_argnums=(3, 4))(a, b, neuron_ids, 4, 6)
    np.testing.assert_allclose(scattered, _scattered(a, b, neuron_ids, 4, 7)[:6], rtol=1e-5, atol=1e-5)


def test_blocks_may_be_taken_a_few_at_a_time(monkeypatch):
    a = jitted.sparsify_venom(random((104, 64), jnp.float32, 7), 8, 8)
    b = random((64, 16), jnp.float32, 8)
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
    w, a, b = (random((2, 40, 32), jnp.float32, seed) for seed in (11, 12, 13))
    b = b.mT

    def products(w, a, b):
        w, a = ops.sparsify_24(w), ops.sparsify_venom(a, 16, 8)
        return ops.matmul_24(w, b), ops.matmul_venom(a, b), ops.sampled_matmul_24(w, b.T, a.columns[:3, :16], 16)

    both, one = jax.jit(jax.vmap(products))(w, a, b), jax.jit(products)
    for layer in range(2):
        for stacked, single in zip(both, one(w[layer], a[layer], b[layer]), strict=True):
            np.testing.assert_allclose(stacked[layer], single, rtol=1e-5, atol=1e-5)
