"""Linear layers of one input: values and gradients against float64, and what the backward pass computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.model.linear import linear
from sparse_lm.model.remat import remat
from tests.model.jaxprs import count

OUTPUTS = 24, 8, 8  # of grouped queries, keys and values


def arrays(*shapes):
    rng = np.random.default_rng(len(shapes))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def test_values_and_gradients():
    x, *weights = arrays((2, 5, 16), *((n, 16) for n in OUTPUTS))
    cotangents = arrays(*((2, 5, n) for n in OUTPUTS))
    found, vjp = jax.vjp(lambda x, weights: linear(x, weights, "bf16"), x, weights)
    of_x, of_weights = vjp(cotangents)

    x64, *rest = (np.asarray(a, np.float64) for a in (x, *weights, *cotangents))
    weights64, cotangents64 = rest[:3], rest[3:]
    close = dict(rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_x, sum(g @ w for g, w in zip(cotangents64, weights64, strict=True)), **close)
    assert len(found) == len(of_weights) == 3
    for y, of_w, w, g in zip(found, of_weights, weights64, cotangents64, strict=True):
        np.testing.assert_allclose(y, x64 @ w.T, **close)
        np.testing.assert_allclose(of_w, g.reshape(-1, len(w)).T @ x64.reshape(-1, 16), **close)


@pytest.mark.parametrize("policy, products", [("save_dots", 5), ("full", 8)])
def test_gradients_are_of_two_products_and_sums_of_none(policy, products):
    """Three products forward; again where they are not saved."""
    x, *weights = arrays((2, 5, 16), *((n, 16) for n in OUTPUTS))

    def loss(x, weights):
        return sum(jnp.sum(jnp.sin(y)) for y in linear(x, weights, "bf16"))

    jaxpr = jax.make_jaxpr(jax.grad(remat(loss, policy), argnums=(0, 1)))(x, weights).jaxpr
    assert count(jaxpr, "dot_general") == products and count(jaxpr, "add_any") == 0
