"""Embedding lookups, and both forms of their gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.model.embedding import ONE_HOT_VOCABULARY, embed, unembed
from tests.model.jaxprs import count

TOKENS = np.array([[3, 1, 3], [0, 3, 12]], np.int32)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lookup_and_gradient(monkeypatch, backend, dtype):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(13, 5)), jnp.float32)
    cotangent = jnp.asarray(rng.normal(size=(2, 3, 5)), dtype)

    rows, pull = jax.vjp(lambda t: embed(t, TOKENS, dtype), table)
    (gradient,) = pull(cotangent)

    np.testing.assert_array_equal(rows, table.astype(dtype)[TOKENS])
    assert gradient.dtype == jnp.float32
    wanted = np.zeros((13, 5))
    np.add.at(wanted, TOKENS, np.asarray(cotangent, np.float64))
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "vocabulary", "dense_products"),
    [("gpu", ONE_HOT_VOCABULARY, 1), ("gpu", ONE_HOT_VOCABULARY + 1, 0), ("cpu", 13, 0)],
)
def test_small_vocabularies_avoid_the_scatter_on_a_gpu(monkeypatch, backend, vocabulary, dense_products):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    table = jnp.zeros((vocabulary, 4))
    jaxpr = jax.make_jaxpr(jax.grad(lambda t: embed(t, TOKENS, "float32").sum()))(table).jaxpr
    assert (count(jaxpr, "dot_general"), count(jaxpr, "scatter-add")) == (dense_products, 1 - dense_products)


def test_logits_are_float32_sums_of_low_precision_products():
    rng = np.random.default_rng(1)
    hidden, table = (
        jnp.asarray(rng.normal(size=(3, 64)), jnp.bfloat16),
        jnp.asarray(rng.normal(size=(7, 64)), jnp.float32),
    )
    logits = unembed(hidden, table)
    assert logits.dtype == jnp.float32
    wanted = np.asarray(hidden, np.float64) @ np.asarray(table.astype(jnp.bfloat16), np.float64).T
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-5)
