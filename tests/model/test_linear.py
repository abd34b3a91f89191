"""Checks what the backward pass of linear layers that share an input computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.model.linear import linear
from sparse_lm.model.remat import remat
from tests.model.jaxprs import count


@pytest.mark.parametrize("policy, products", [("save_dots", 5), ("full", 8)])
def test_gradients_are_of_two_products_and_sums_of_none(policy, products):
    """Three products forward; again where they are not saved. test_llama.py has their values."""
    rng = np.random.default_rng(0)
    shapes = (2, 5, 16), (24, 16), (8, 16), (8, 16)  # of x, and of the weights of grouped queries, keys and values
    x, *weights = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)

    def loss(x, weights):
        return sum(jnp.sum(jnp.sin(y)) for y in linear(x, weights, "bf16"))

    jaxpr = jax.make_jaxpr(jax.grad(remat(loss, policy), argnums=(0, 1)))(x, weights).jaxpr
    assert count(jaxpr, "dot_general") == products and count(jaxpr, "add_any") == 0
