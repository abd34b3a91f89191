"""Recipes in a training loop that is not ours: plain JAX, with an optimizer of its own.

The model is a language model of two tokens' context: residual FFNs between an embedding and its transpose.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.recipes import DENSE, Act24, DenseSlices, Fst, Slices, SSte, Venom

LAYERS, DIM, NEURONS, VOCAB, BATCH, LENGTH = 2, 24, 64, 32, 4, 24
RECIPES = {
    "fst": Fst(),
    "sste": SSte(),
    "act24": Act24(dense_features=0.0),
    "venom": Venom(v=16, m=8, experts=2),
    "slices": Slices(v=8, m=8),
    "dense_slices": DenseSlices(v=8, m=8),
}


def init():
    shapes = {
        "embedding": (VOCAB, DIM),
        "before": (VOCAB, DIM),
        "w1": (LAYERS, NEURONS, DIM),
        "w2": (LAYERS, NEURONS, DIM),
    }
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


@dataclasses.dataclass
class Run:
    """A model in training; `ffn_inputs` [L, T, D] are those of its last step."""

    params: dict
    moments: dict
    ffn_inputs: jax.Array | None = None
    losses: tuple[float, ...] = ()

    def train(self, recipe, states, steps):
        for step in range(len(self.losses), len(self.losses) + steps):
            out = train_step(recipe, self.params, self.moments, states, batch(step), step)
            self.params, self.moments, loss, self.ffn_inputs = out
            self.losses += (float(loss),)

    @property
    def ffn_weights(self):
        return self.params["w1"], self.params["w2"]


@functools.cache
def after_dense_steps():
    params = init()
    run = Run(params, {name: jax.tree.map(jnp.zeros_like, params) for name in ("first", "second")})
    run.train(DENSE, DENSE.State(), 20)
    return run


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_trains_dense_then_sparse_then_dense(name):
    recipe, run = RECIPES[name], dataclasses.replace(after_dense_steps())
    states, order = jax.jit(jax.vmap(recipe.enter))(*run.ffn_weights, run.ffn_inputs)
    if order is not None:
        run.params = sorted_neurons(run.params, order)
        run.moments = {moment: sorted_neurons(tree, order) for moment, tree in run.moments.items()}
    run.train(recipe, states, 15)
    if recipe.refreshes:
        states, _ = jax.jit(jax.vmap(recipe.refresh))(*run.ffn_weights, states, run.ffn_inputs)
    run.train(recipe, states, 15)
    left = jax.jit(jax.vmap(recipe.leave))(*run.ffn_weights, states)
    run.params |= dict(zip(("w1", "w2"), left, strict=True))
    run.train(DENSE, DENSE.State(), 15)
    at_flips = [np.mean(run.losses[last - 5 : last]) for last in (20, 50, 65)]
    assert (np.diff(at_flips) < -0.1).all(), run.losses
