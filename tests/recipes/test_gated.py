"""Gated FFNs by every recipe that computes them, against float64 formulas: three products forward, six backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.recipes import RECIPES
from sparse_lm.recipes.activations import GATES
from tests.recipes import masked_dense_ffn as dense64
from tests.recipes.examples import DO, KEY, TOKENS, W2, X, output, outputs_and_gradients, random
from tests.recipes.test_ffn import draw

GATED = [name for name, recipe in RECIPES.items() if "gated" in recipe.computes]
W1 = random(7, 2 * W2.shape[0], W2.shape[1]) / 4


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def tanh_gelu(x):
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return x / 2 * (1 + np.tanh(inner)), (1 + np.tanh(inner)) / 2 + x / 2 * slope / np.cosh(inner) ** 2


FORMULAS = {  # of a gate: value and derivative
    "swiglu": lambda g: (g * sigmoid(g), sigmoid(g) * (1 + g * (1 - sigmoid(g)))),
    "geglu": tanh_gelu,
    "gated_relu2": lambda g: (np.maximum(g, 0) ** 2, 2 * np.maximum(g, 0)),
}


def weights_of(name, state):
    """W1 and W2 as the forward reads them, and W2 and W1 as the backward does."""
    w1, w2 = (np.asarray(w, np.float64) for w in (W1, W2))
    if name == "fst":
        w1, w2 = w1 * np.asarray(state.mask_up), w2 * np.asarray(state.mask_down)
    elif name == "sste":
        w1 = float(state.scale_up) * dense64.soft_threshold(w1, axis=1)
        w2 = float(state.scale_down) * dense64.soft_threshold(w2, axis=0)
    return w1, w2


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("name", GATED)
def test_formulas(name, activation):
    recipe = RECIPES[name](activation=activation)
    state, order = jax.jit(recipe.enter)(W1, W2)
    assert order is None
    o, dx, dw1, dw2, _ = outputs_and_gradients(recipe)(X, W1, W2, DO, state, KEY, None)

    x, do = np.asarray(X, np.float64), np.asarray(DO, np.float64)
    w1, w2 = weights_of(name, state)
    gate, up = x @ w1[::2].T, x @ w1[1::2].T
    value, derivative = FORMULAS[activation](gate)
    y, dy = value * up, do @ w2.T
    dh = np.stack([dy * up * derivative, dy * value], axis=-1).reshape(TOKENS, -1)
    stochastic = recipe.stochastic
    wanted = {
        "o": (o, y @ w2),
        "dx": (dx, dh @ w1),
        "dw1": (dw1, (draw(dh, 1) if stochastic else dh).T @ x),
        "dw2": (dw2, y.T @ (draw(do, 2) if stochastic else do)),
    }
    for what, (found, expected) in wanted.items():
        assert np.linalg.norm(found - expected) < 2e-5 * np.linalg.norm(expected), what


@pytest.mark.parametrize("name", GATED)
def test_leaving_keeps_the_function(name):
    recipe = RECIPES[name](activation="swiglu")
    state, _ = jax.jit(recipe.enter)(W1, W2)
    left = jax.jit(recipe.leave)(W1, W2, state)
    dense = output(RECIPES["dense"](activation="swiglu"))(X, *left, None)
    np.testing.assert_allclose(dense, output(recipe)(X, W1, W2, state), rtol=1e-4, atol=1e-4)


def test_recipes_that_compute_no_gates_refuse_them():
    for name in set(RECIPES) - set(GATED):
        with pytest.raises(ValueError, match="not gated"):
            RECIPES[name](activation="geglu").ffn(jnp.ones((4, 24)), W1, W2)
