"""Recipes in a training loop that is not ours: plain JAX, with an optimizer of its own.

The model is a language model of two tokens' context: residual FFNs between an embedding and its transpose.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.recipes import DENSE, Act24, Fst, Slices

LAYERS, DIM, NEURONS, VOCAB, BATCH, LENGTH = 2, 24, 64, 32, 4, 24
RECIPES = {"fst": Fst(), "act24": Act24(dense_features=0.0), "slices": Slices(v=8, m=8)}


def init():
    shapes = {"embedding": (VOCAB, DIM), "before": (VOCAB, DIM)} | dict.fromkeys(["w1", "w2"], (LAYERS, NEURONS, DIM))
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=s) / DIM**0.5, jnp.float32) for name, s in shapes.items()}


def batch(step):
    """Sequences in which a token follows from the two before it."""
    rng = np.random.default_rng(step)
    tokens = list(rng.integers(VOCAB, size=(2, BATCH)))
    for _ in range(LENGTH - 1):
        tokens.append((tokens[-1] + 3 * (tokens[-2] % 4) + 5) % VOCAB)
    return np.stack(tokens, axis=1)


def normalised(x):
    return x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5)


def loss_and_inputs(params, tokens, recipe, states, key):
    """The mean cross entropy, and the FFNs' inputs [L, T, D]."""
    x = params["embedding"][tokens[:, 1:-1]] + params["before"][tokens[:, :-2]]

    @jax.checkpoint
    def layer(x, inputs):
        w1, w2, state, key = inputs
        ffn_input = normalised(x)
        o, _ = recipe.ffn(ffn_input, w1, w2, state, key=key)
        return x + o, ffn_input.reshape(-1, DIM)

    x, ffn_inputs = jax.lax.scan(layer, x, (params["w1"], params["w2"], states, jax.random.split(key, LAYERS)))
    log_likelihood = jax.nn.log_softmax(normalised(x) @ params["embedding"].T)
    return -jnp.mean(jnp.take_along_axis(log_likelihood, tokens[:, 2:, None], axis=-1)), ffn_inputs


@functools.partial(jax.jit, static_argnums=0)
def train_step(recipe, params, moments, states, tokens, step):
    """Adam, as its paper has it."""
    key = jax.random.fold_in(jax.random.key(0), step)
    (loss, ffn_inputs), grads = jax.value_and_grad(loss_and_inputs, has_aux=True)(params, tokens, recipe, states, key)
    grads["w1"], grads["w2"] = jax.vmap(recipe.adjust_gradients)(
        grads["w1"], grads["w2"], params["w1"], params["w2"], states
    )
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments["first"], grads)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * jnp.square(g), moments["second"], grads)
    t = step + 1

    def update(w, m, s):
        return w - 0.01 * m / (1 - 0.9**t) / (jnp.sqrt(s / (1 - 0.99**t)) + 1e-8)

    return jax.tree.map(update, params, first, second), {"first": first, "second": second}, loss, ffn_inputs


def sorted_neurons(tree, order):
    move = lambda w: jnp.take_along_axis(w, order[:, :, None], axis=1)  # noqa: E731
    return tree | {name: move(tree[name]) for name in ("w1", "w2")}


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_train_dense_then_sparse_then_dense(name):
    recipe, params, losses = RECIPES[name], init(), []
    moments = {moment: jax.tree.map(jnp.zeros_like, params) for moment in ("first", "second")}

    def train(recipe, states, steps):
        """Returns the inputs of the FFNs in the last step, [L, T, D]."""
        nonlocal params, moments
        for step in range(len(losses), len(losses) + steps):
            params, moments, loss, ffn_inputs = train_step(recipe, params, moments, states, batch(step), step)
            losses.append(float(loss))
        return ffn_inputs

    ffn_inputs = train(DENSE, DENSE.State(), 20)
    states, order = jax.jit(jax.vmap(recipe.enter))(params["w1"], params["w2"], ffn_inputs)
    if order is not None:
        params, *sorted_moments = (sorted_neurons(tree, order) for tree in (params, *moments.values()))
        moments = dict(zip(moments, sorted_moments, strict=True))
    ffn_inputs = train(recipe, states, 15)
    if recipe.refreshes:
        states, _ = jax.jit(jax.vmap(recipe.refresh))(params["w1"], params["w2"], states, ffn_inputs)
    train(recipe, states, 15)
    params["w1"], params["w2"] = jax.jit(jax.vmap(recipe.leave))(params["w1"], params["w2"], states)
    train(DENSE, DENSE.State(), 15)
    at_flips = [np.mean(losses[last - 5 : last]) for last in (20, 50, 65)]
    assert (np.diff(at_flips) < -0.1).all(), losses
