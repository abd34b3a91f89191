"""Tests what a mixture decides, its balance and its statistics; test_llama.py has the layer's formulas."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparse_lm.config import ModelConfig
from sparse_lm.model import llama, mixture
from sparse_lm.model.ffn import FfnInputs
from sparse_lm.recipes import DENSE, Experts24
from tests.model import numpy_llama
from tests.recipes import numpy_mixture

CONFIG = ModelConfig(dim=24, layers=2, heads=2, kv_heads=2, experts=5, expert_dim=20, vocab_size=40, dtype="float32")
TOKENS = 90


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X, DO = random(0, TOKENS, CONFIG.dim), random(1, TOKENS, CONFIG.dim)
ROUTER, BIAS = random(2, 5, CONFIG.dim), random(3, 5) / 10


def test_the_router_is_float32_in_a_bfloat16_model():
    """Logits of rounded inputs are exact: a router in bfloat16 would choose otherwise."""
    x = X.astype(jnp.bfloat16)
    chosen, gates, _ = mixture.route(x, ROUTER, BIAS, 3, "softmax")
    exact, _, _ = mixture.route(x.astype(jnp.float32), ROUTER, BIAS, 3, "softmax")
    np.testing.assert_array_equal(chosen, exact)
    assert gates.dtype == jnp.float32


def test_a_score_that_is_not_finite_harms_its_own_token_alone():
    broken, _, _ = mixture.route(X.at[7].set(jnp.nan), ROUTER, BIAS, 3, "softmax")
    whole, _, _ = mixture.route(X, ROUTER, BIAS, 3, "softmax")
    np.testing.assert_array_equal(np.delete(broken, 7, axis=0), np.delete(whole, 7, axis=0))
    assert sorted(set(broken[7].tolist())) == sorted(broken[7].tolist()) and (broken >= 0).all() and (broken < 5).all()


@functools.cache
def layer(**overrides):
    """A mixture of one layer, with a router and a bias that matter."""
    made = mixture.Mixture(dataclasses.replace(CONFIG, **overrides), nnx.Rngs(0))
    made.router[...], made.router_bias[...] = ROUTER, BIAS
    return nnx.split(made)


@pytest.mark.parametrize("recipe", [DENSE, Experts24(v=16)], ids=lambda recipe: recipe.name)
def test_router_and_experts_get_their_gradients(recipe):
    """Gradients are of the layer and its z-loss together. The router's goes through the gates' by float64 formulas."""
    graphdef, params = layer(experts_per_token=3)
    scales = jnp.float32(1.4), jnp.float32(1.3)
    state = recipe.State(*scales) if recipe.products else None
    key = jax.random.key(4)

    @jax.jit
    def gradients(params, x):
        def objective(params, x):
            o, stats = nnx.merge(graphdef, params)(x, FfnInputs(state, key), recipe=recipe)
            return jnp.sum(o * DO) + stats[mixture.Z_LOSS]

        return jax.grad(objective, argnums=(0, 1))(params, x)

    of_params, dx = gradients(params, X)
    x, do, router, up, down = (np.asarray(a, np.float64) for a in (X, DO, params.router, params.up, params.down))
    score = numpy_llama.scores(x @ router.T / np.sqrt(CONFIG.dim), CONFIG)
    chosen = np.argsort(-(score + np.asarray(BIAS)), axis=-1)[:, :3]

    def gates_and_z(x, router):
        logits = x @ router.T / np.sqrt(CONFIG.dim)
        own = np.take_along_axis(numpy_llama.scores(logits, CONFIG), chosen, axis=-1)
        return own / own.sum(-1, keepdims=True), np.mean(np.log(np.exp(logits).sum(-1)) ** 2)

    options = dict(scales=[float(s) for s in scales]) if recipe.products else {}
    gates, _ = gates_and_z(x, router)
    shape = 5, 20, 24
    result, dgates = numpy_mixture.mixture(x, up.reshape(shape), down.reshape(shape), gates, chosen, do, v=1, **options)

    def slope(x_direction, router_direction, step=1e-6):
        """Along a direction, of what the gates and the z-loss do."""
        ahead, behind = (gates_and_z(x + s * x_direction, router + s * router_direction) for s in (step, -step))
        return (np.sum(dgates * (ahead[0] - behind[0])) + ahead[1] - behind[1]) / (2 * step)

    for seed in range(3):
        along_router, along_x = np.asarray(random(seed + 5, *router.shape)), np.asarray(random(seed + 9, *x.shape))
        found = np.vdot(np.asarray(of_params.router[...], np.float64), along_router)
        np.testing.assert_allclose(found, slope(0, along_router), rtol=1e-3)
        expected = slope(along_x, 0) + np.vdot(result.dx, along_x)
        np.testing.assert_allclose(np.vdot(np.asarray(dx, np.float64), along_x), expected, rtol=1e-3)
    assert not of_params.router_bias[...].any()
    if recipe is DENSE:
        np.testing.assert_allclose(of_params.up[...], result.dw1, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(of_params.down[...], result.dw2, rtol=1e-4, atol=1e-4)


def test_statistics():
    graphdef, params = layer()
    _, stats = jax.jit(lambda params: nnx.merge(graphdef, params)(X, FfnInputs(), recipe=DENSE))(params)
    chosen, _, _ = mixture.route(X, params.router[...], BIAS, 2, "softmax")
    logits = np.asarray(X, np.float64) @ np.asarray(ROUTER, np.float64).T / np.sqrt(CONFIG.dim)
    np.testing.assert_allclose(stats[mixture.Z_LOSS], np.mean(np.log(np.exp(logits).sum(-1)) ** 2), rtol=1e-5)
    load = np.bincount(np.asarray(chosen).reshape(-1), minlength=5) / chosen.size
    np.testing.assert_allclose(stats["expert_load"], load, rtol=1e-6)
    np.testing.assert_allclose(stats["load_entropy"], -np.sum(load * np.log(load)) / np.log(5), rtol=1e-5)
    np.testing.assert_allclose(stats["largest_router_bias"], np.abs(BIAS).max())


def test_initial_experts_are_as_large_as_ffns_of_their_width():
    config = dataclasses.replace(CONFIG, dim=128, experts=8, expert_dim=256, shared_expert_dim=512, layers=8)
    _, params = jax.jit(functools.partial(llama.init, config))(jax.random.key(0))
    ffn, residual = params["layers"]["ffn"], (2 * 8) ** -0.5
    deviations = {name: float(np.std(ffn[name])) for name in ffn}
    wanted = dict(
        router=128**-0.5, router_bias=0, up=128**-0.5, down=256**-0.5 * residual, shared_up=128**-0.5,
        shared_down=512**-0.5 * residual,
    )  # fmt: skip
    assert deviations == pytest.approx(wanted, rel=0.03)
    assert ffn["up"].shape == ffn["down"].shape == (8, 8 * 256, 128)
