"""Embedding lookups with their gradient, and logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.model.embedding import embed, unembed
from tests.model.jaxprs import equations

TOKENS = np.array([[3, 1, 3], [0, 3, 12]], np.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lookup_and_gradient(dtype):
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(13, 5)), jnp.float32)
    cotangent = jnp.asarray(rng.normal(size=(2, 3, 5)), dtype)

    rows, pull = jax.vjp(lambda t: embed(t, TOKENS, dtype), table)
    (gradient,) = pull(cotangent)

    np.testing.assert_array_equal(rows, table.astype(dtype)[TOKENS])
    wanted = np.zeros((13, 5))
    np.add.at(wanted, TOKENS, np.asarray(cotangent, np.float64))
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6, atol=1e-6)


def test_the_gradient_is_scattered_in_float32():
    jaxpr = jax.make_jaxpr(jax.grad(lambda t: embed(t, TOKENS, "bfloat16").sum()))(jnp.zeros((13, 5))).jaxpr
    scatters = [equation for equation in equations(jaxpr) if equation.primitive.name == "scatter-add"]
    assert [variable.aval.dtype for equation in scatters for variable in equation.outvars] == [jnp.float32]


def test_logits_are_float32_sums_of_low_precision_products():
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(3, 64)), jnp.bfloat16)
    table = jnp.asarray(rng.normal(size=(7, 64)), jnp.float32)
    logits = unembed(hidden, table)
    assert logits.dtype == jnp.float32
    wanted = np.asarray(hidden, np.float64) @ np.asarray(table.astype(jnp.bfloat16), np.float64).T
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-5)
