"""The sparse products of the reference, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import reference
from tests.ops import jitted
from tests.ops.operands import exact_product, product_operands, random_rows

# As `product_operands` takes them, options, and a dtype: whole shapes in float32, ragged ones in bfloat16.
CASES = [
    ("matmul_24", (64, 128, 32), {}, jnp.float32),
    ("matmul_24", (33, 52, 7), {}, jnp.bfloat16),
    ("matmul_24", (33, 52, 7), dict(out_transposed=True), jnp.bfloat16),
    ("matmul_venom", (128, 64, 16, 24, 64, 1), {}, jnp.float32),
    ("matmul_venom", (37, 60, 20, 10, 16, 1), {}, jnp.bfloat16),
    ("matmul_venom", (56, 32, 16, 5, 8, 1), dict(rows=random_rows(50, 56, seed=11)), jnp.bfloat16),
    ("sampled_matmul_24", (64, 32, 48, 16, 8, 8), {}, jnp.float32),
    ("sampled_matmul_24", (37, 20, 30, 7, 16, 1), {}, jnp.bfloat16),
    ("scattered_matmul_24", (64, 32, 16, 48, 32, 8), {}, jnp.float32),
    ("scattered_matmul_24", (37, 20, 7, 30, 16, 1), {}, jnp.bfloat16),
]


@pytest.mark.parametrize("op, shape, options, dtype", CASES)
def test_products_are_summed_in_float32_and_rounded_once(op, shape, options, dtype):
    operands, more = product_operands(op, shape, dtype)
    options = options | more
    exact = exact_product(op, jitted.dense(operands[0]), *operands[1:], **options)
    product = lambda *operands, **out: getattr(ops, op)(*operands, **options, **out)  # noqa: E731
    both = jax.jit(lambda *operands: (product(*operands), product(*operands, out_dtype=jnp.float32)))
    for result, result_dtype in zip(both(*operands), (dtype, jnp.float32), strict=True):
        assert result.dtype == result_dtype
        rounding = float(jnp.finfo(result_dtype).eps) / 2
        np.testing.assert_allclose(np.asarray(result, np.float64), exact, rtol=rounding, atol=2e-5)


def test_a_sampled_product_may_be_squared():
    operands, options = product_operands("sampled_matmul_24", (37, 20, 30, 7, 16, 1), jnp.float32)
    exact = exact_product("sampled_matmul_24", jitted.dense(operands[0]), *operands[1:], **options)
    squared = jax.jit(lambda *operands: ops.sampled_matmul_24(*operands, **options, squared_relu=True))(*operands)
    np.testing.assert_allclose(squared, np.square(np.maximum(exact, 0)), rtol=1e-5, atol=1e-5)


def test_neurons_that_are_none_are_left_out():
    (a, b, _), _ = product_operands("scattered_matmul_24", (8, 5, 4, 6, 4, 1), jnp.float32)
    operands, options = (a, b, jnp.array([[6, 5, 1, 6], [2, 6, 5, 3]], jnp.int32)), dict(v=4, rows=6)  # 6: none
    exact = exact_product("scattered_matmul_24", jitted.dense(a), *operands[1:], **options)
    out = jax.jit(lambda *operands: ops.scattered_matmul_24(*operands, **options))(*operands)
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-5)


def test_blocks_may_be_taken_a_few_at_a_time(monkeypatch):
    (a, b), _ = product_operands("matmul_venom", (104, 64, 32, 16, 8, 1), jnp.float32)
    monkeypatch.setattr(reference, "_GATHERED_ELEMENTS", 3 * 32 * 16)  # three of 13 blocks
    a_few = jax.jit(lambda: ops.matmul_venom(a, b))()
    np.testing.assert_allclose(a_few, exact_product("matmul_venom", jitted.dense(a), b), rtol=1e-5, atol=1e-5)


def test_a_sum_of_many_small_numbers_loses_none():
    ones = jnp.ones((4096, 1), jnp.bfloat16)
    w = jitted.sparsify_24(ones.T, "magnitude")
    assert ops.matmul_24(w, ones, out_dtype=jnp.float32) == 4096 // 2  # a bfloat16 accumulator stops at 256
