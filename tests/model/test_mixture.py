"""Tests what a mixture decides, its balance and its statistics; test_llama.py has the layer's formulas."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparse_lm.config import ModelConfig
from sparse_lm.model import llama, mixture
from sparse_lm.model.ffn import FfnInputs
from sparse_lm.recipes import DENSE
from tests.recipes.examples import random

CONFIG = ModelConfig(dim=24, layers=2, heads=2, kv_heads=2, experts=5, expert_dim=20, vocab_size=40, dtype="float32")
TOKENS = 90
X = random(0, TOKENS, CONFIG.dim)
ROUTER, BIAS = random(2, 5, CONFIG.dim), random(3, 5) / 10


def test_the_router_is_float32_in_a_bfloat16_model():
    """Logits of rounded inputs are exact: a router in bfloat16 would choose otherwise."""
    x = X.astype(jnp.bfloat16)
    chosen, gates, _ = mixture.route(x, ROUTER, BIAS, 3, "softmax")
    exact, _, _ = mixture.route(x.astype(jnp.float32), ROUTER, BIAS, 3, "softmax")
    np.testing.assert_array_equal(chosen, exact)
    assert gates.dtype == jnp.float32


@pytest.mark.parametrize("choices", [2, 5])
def test_the_best_expert_comes_first_and_of_equal_ones_the_first(choices):
    for bias in ([0, 1, 0, 1, 0], [2, -1, 2, 2, -1]):
        chosen, _, _ = mixture.route(X, jnp.zeros_like(ROUTER), jnp.array(bias, jnp.float32), choices, "softmax")
        wanted = np.argsort([-b for b in bias], stable=True)[:choices]
        np.testing.assert_array_equal(chosen, np.broadcast_to(wanted, chosen.shape))


def test_a_score_that_is_not_finite_harms_its_own_token_alone():
    broken, _, _ = mixture.route(X.at[7].set(jnp.nan), ROUTER, BIAS, 3, "softmax")
    whole, _, _ = mixture.route(X, ROUTER, BIAS, 3, "softmax")
    np.testing.assert_array_equal(np.delete(broken, 7, axis=0), np.delete(whole, 7, axis=0))
    assert sorted(set(broken[7].tolist())) == sorted(broken[7].tolist()) and (broken >= 0).all() and (broken < 5).all()


@pytest.mark.parametrize("scores, logits", [("softmax", [200.0, 0.0, 1.0]), ("sigmoid", [-150.0, -201.0, -200.0])])
def test_gates_of_scores_that_float32_has_no_number_for(scores, logits):
    """The bias chooses experts of scores e apart, too small for float32, in place of the first or of none."""
    x, router = jnp.ones((1, 4)), jnp.array(logits)[:, None] * jnp.array([2.0, 0, 0, 0])  # logits over sqrt(4)
    chosen, gates, _ = mixture.route(x, router, jnp.array([0.0, 2.0, 3.0]), 2, scores)
    np.testing.assert_array_equal(chosen, [[2, 1]])
    np.testing.assert_allclose(gates, [[math.e / (1 + math.e), 1 / (1 + math.e)]], rtol=1e-5)


@functools.cache
def layer(**overrides):
    """A mixture of one layer, with a router and a bias that matter."""
    made = mixture.Mixture(dataclasses.replace(CONFIG, **overrides), nnx.Rngs(0))
    made.router[...], made.router_bias[...] = ROUTER, BIAS
    return nnx.split(made)


def z_loss(x, router):
    """The mean square of log-sum-exp of the router's logits, in float64."""
    return np.mean(np.log(np.exp(x @ router.T / np.sqrt(CONFIG.dim)).sum(-1)) ** 2)


def test_the_z_loss_has_its_gradient():
    """Gradients of router and inputs are float64's differences; those through the gates, test_llama.py has."""
    graphdef, params = layer()

    @jax.jit
    def gradients(params, x):
        loss = lambda params, x: nnx.merge(graphdef, params)(x, FfnInputs(), recipe=DENSE)[1][mixture.Z_LOSS]  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(params, x)

    of_params, dx = gradients(params, X)
    found = [np.asarray(a, np.float64) for a in (dx, of_params.router[...])]
    inputs = [np.asarray(a, np.float64) for a in (X, ROUTER)]
    for seed in range(3):
        step = [1e-6 * np.asarray(random(seed + 5, *a.shape)) for a in inputs]
        ahead, behind = (z_loss(*(a + sign * s for a, s in zip(inputs, step, strict=True))) for sign in (1, -1))
        np.testing.assert_allclose(sum(map(np.vdot, found, step)), (ahead - behind) / 2, rtol=1e-3)
    assert not (of_params.router_bias[...].any() or of_params.up[...].any())


def test_statistics():
    graphdef, params = layer()
    _, stats = jax.jit(lambda params: nnx.merge(graphdef, params)(X, FfnInputs(), recipe=DENSE))(params)
    chosen, _, _ = mixture.route(X, params.router[...], BIAS, 2, "softmax")
    np.testing.assert_allclose(stats[mixture.Z_LOSS], z_loss(np.float64(X), np.float64(ROUTER)), rtol=1e-5)
    load = np.bincount(np.asarray(chosen).reshape(-1), minlength=5) / chosen.size
    np.testing.assert_allclose(stats["expert_load"], load, rtol=1e-6)
    entropy = -np.sum(load * np.log(load)) / np.log(5)
    np.testing.assert_allclose(mixture.load_entropy(stats["expert_load"][None]), [entropy], rtol=1e-5)
    np.testing.assert_allclose(stats["largest_router_bias"], np.abs(BIAS).max())


def test_biases_move_against_the_loads_and_by_no_more_than_a_new_routers_scores_differ():
    moved = mixture.balanced(BIAS[None], jnp.array([[0.2, 0.5, 0.1, 0.05, 0.15]])) - BIAS
    np.testing.assert_allclose(moved, 4e-3 / 5 * np.array([[0, -1, 1, 1, 1]]), atol=1e-7)


def test_loads_that_differ_by_rounding_move_no_bias():
    load = 0.2 + 1e-7 * random(4, 1, 5)
    np.testing.assert_array_equal(mixture.balanced(BIAS[None], load), BIAS[None])


def test_initial_experts_are_as_large_as_ffns_of_their_width():
    config = dataclasses.replace(CONFIG, dim=128, experts=8, expert_dim=64, shared_expert_dim=256, layers=8)
    _, params = jax.jit(functools.partial(llama.init, config))(jax.random.key(0))
    ffn, residual = params["layers"]["ffn"], (2 * 8) ** -0.5
    deviations = {name: float(np.std(ffn[name])) for name in ffn}
    wanted = dict(
        router=128**-0.5, router_bias=0, up=128**-0.5, down=64**-0.5 * residual, shared_up=128**-0.5,
        shared_down=256**-0.5 * residual,
    )  # fmt: skip
    assert deviations == pytest.approx(wanted, rel=0.03)
    assert ffn["up"].shape == ffn["down"].shape == (8, 8 * 64, 128)
