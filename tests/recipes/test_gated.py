"""Gated FFNs by every recipe that computes them, against float64 formulas: three products forward, six backward."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.recipes import RECIPES
from sparse_lm.recipes.activations import GATES
from sparse_lm.recipes.routing import sort_neurons
from tests.recipes import examples
from tests.recipes import masked_dense_ffn as dense64
from tests.recipes.examples import DO, KEY, NEURONS, ORDER, TOKENS, W2, X, output, outputs_and_gradients, random
from tests.recipes.test_ffn import assert_best_is_as_accurate_as_the_reference, draw

GATED = {
    f"{name}, {activation}": dataclasses.replace(recipe, activation=activation)
    for name, recipe in examples.RECIPES.items()
    for activation in GATES
    if activation in recipe.computes
}
GATES_IN_TURN = [f"dense, {activation}" for activation in GATES] + [
    "fst, swiglu", "sste, geglu", "dense_slices, swiglu", "dense_slices, geglu", "slices, gated_relu2"
]  # fmt: skip
"""Every gate, and every recipe that computes gates."""
ROUTED = {case: recipe for case, recipe in GATED.items() if recipe.takes_order}
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


def weights_of(recipe, state):
    """W1 and W2 as the products read them."""
    w1, w2 = (np.asarray(w, np.float64) for w in (W1, W2))
    if recipe.name == "fst":
        return w1 * np.asarray(state.mask_up), w2 * np.asarray(state.mask_down)
    if recipe.sparse_weights:
        axis = 0 if recipe.name == "sste" else 1
        return (
            float(state.scale_up) * dense64.soft_threshold(w1, axis=1),
            float(state.scale_down) * dense64.soft_threshold(w2, axis=axis),
        )
    return w1, w2


def state_of(recipe):
    """As `enter` makes it, or with centroids that it would not choose."""
    state, _ = jax.jit(recipe.enter)(W1, W2, X)
    return state._replace(centroids=random(5, *state.centroids.shape)) if recipe.takes_order else state


def expected(recipe, state, draw):
    """The output, the gradients and the statistics, of the formulas with what `draw` estimates of an operand."""
    x, do = np.asarray(X, np.float64), np.asarray(DO, np.float64)
    w1, w2 = weights_of(recipe, state)
    computed = kept = np.ones((TOKENS, NEURONS))
    stats = {}
    if recipe.takes_order:
        experts, own, computed = dense64.slices_of_tokens(x, np.asarray(state.centroids), NEURONS, recipe.shards)
        stats["expert_load"] = np.bincount(experts, minlength=recipe.experts) / TOKENS
    gate, up = x @ w1[::2].T, x @ w1[1::2].T
    value, derivative = FORMULAS[recipe.activation](gate)
    all_of_y = value * up * computed
    if recipe.name == "slices":
        kept = np.zeros_like(computed)
        two = dense64.top_two_of_four(np.take_along_axis(all_of_y, own, axis=1))
        np.put_along_axis(kept, own, two, axis=1)
    y, dy = all_of_y * kept, do @ w2.T * computed * kept
    dh = np.stack([dy * up * derivative, dy * value], axis=-1)  # [T, F, 2]

    def drawn(z, use):
        """The estimate of z [T, F, n] that is drawn of an expert's neurons, in slots."""
        slots = dense64.slots_of_tokens(experts, np.asarray(ORDER), recipe.experts, recipe.v)
        condensed = np.take_along_axis(z, own[..., None], axis=1).reshape(TOKENS, -1)
        in_slots = draw(np.where(slots[:, None] >= 0, condensed[slots], 0), use)
        condensed[slots[slots >= 0]] = in_slots[slots >= 0]
        estimate = np.zeros_like(z)
        np.put_along_axis(estimate, own[..., None], condensed.reshape(*own.shape, z.shape[2]), axis=1)
        return estimate

    of_w1, y_drawn, do_drawn = dh.reshape(TOKENS, -1), y, do
    if recipe.name == "slices":
        of_w1, y_drawn = drawn(dh, 3).reshape(TOKENS, -1), drawn(y[..., None], 3)[..., 0]
    elif recipe.stochastic:
        of_w1, do_drawn = draw(of_w1, 1), draw(do, 2)
    stats["kept_energy"] = np.square(y).sum() / np.square(all_of_y).sum()
    stats["activation_sparsity"] = 1 - np.count_nonzero(all_of_y) / computed.sum()
    return (y @ w2, dh.reshape(TOKENS, -1) @ w1, of_w1.T @ x, y_drawn.T @ do_drawn), stats


@pytest.mark.parametrize(
    "case",
    [
        *GATES_IN_TURN,
        "dense_slices, gated_relu2, sorted for two devices",
        "slices, gated_relu2, sorted for two devices",
        "slices, gated_relu2, much padding",
    ],
)
def test_formulas(case):
    recipe = GATED[", ".join(case.split(", ")[:2])]
    if "two devices" in case:
        recipe = dataclasses.replace(recipe, shards=2)
    elif "padding" in case:
        recipe = dataclasses.replace(recipe, v=64, m=32)
    state = state_of(recipe)
    *found, stats = outputs_and_gradients(recipe)(X, W1, W2, DO, state, KEY, ORDER)
    arrays, expected_stats = expected(recipe, state, draw)
    for name, a, b in zip(("o", "dx", "dw1", "dw2"), found, arrays, strict=True):
        assert np.linalg.norm(a - b) < 2e-5 * np.linalg.norm(b), name
    assert stats.keys() == expected_stats.keys()
    for name, value in expected_stats.items():
        np.testing.assert_allclose(stats[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_stochastic_gradients_of_slices_are_unbiased():
    """The mean over many draws is the gradient of the formulas without a draw, within its own spread."""
    recipe = GATED["slices, gated_relu2"]
    state, keys = state_of(recipe), jax.random.split(jax.random.key(6), 400)

    def gradients(key):
        f = lambda w1, w2: recipe.ffn(X, w1, w2, state, key=key, order=ORDER)[0]  # noqa: E731
        return jax.vjp(f, W1, W2)[1](DO)

    draws = jax.jit(lambda keys: jax.lax.map(gradients, keys, batch_size=50))(keys)
    (*_, dw1, dw2), _ = expected(recipe, state, lambda a, _: a)
    for samples, mean in zip(draws, (dw1, dw2), strict=True):
        samples = np.asarray(samples, np.float64)
        random = samples.std(0) > 1e-2 * samples.std()
        z = (samples.mean(0) - mean)[random] / (samples.std(0)[random] / np.sqrt(len(keys)))
        assert random.mean() > 0.4
        assert abs(np.mean(z)) < 15 / np.sqrt(z.size)  # entries of one product are correlated
        assert 0.8 < np.std(z) < 1.2


@pytest.mark.parametrize("case", GATED)
def test_leaving_keeps_the_function(case):
    """Gives one expert all neurons, of which it keeps all that are not zero."""
    recipe, w1, w2 = GATED[case], W1, W2
    if recipe.takes_order:
        recipe = dataclasses.replace(recipe, m=4)
    if recipe.name == "slices":  # every second gate is the one before with its sign changed
        by_neuron = W1.reshape(NEURONS, 2, -1)
        w1 = by_neuron.at[1::2, 0].set(-by_neuron[::2, 0]).reshape(W1.shape)
    state, order = jax.jit(recipe.enter)(w1, w2, X)
    if order is not None:
        np.testing.assert_array_equal(order, np.arange(NEURONS))
    left = jax.jit(recipe.leave)(w1, w2, state)
    dense = output(RECIPES["dense"](activation=recipe.activation))(X, *left, None)
    np.testing.assert_allclose(dense, output(recipe)(X, w1, w2, state), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ROUTED)
def test_slices_hold_the_neurons_that_their_tokens_use_most(case):
    recipe = ROUTED[case]
    state, order = jax.jit(recipe.enter)(W1, W2, X)
    np.testing.assert_array_equal(np.sort(order), np.arange(NEURONS))
    w1, _ = weights_of(recipe, state)
    gate, up = np.asarray(X, np.float64) @ w1[::2].T, np.asarray(X, np.float64) @ w1[1::2].T
    energy = np.square(FORMULAS[recipe.activation](gate)[0] * up)
    _, own, _ = dense64.slices_of_tokens(X, np.asarray(state.centroids), NEURONS, 1)
    in_slices = np.take_along_axis(energy[:, np.asarray(order)], own, axis=1).sum() / energy.sum()
    assert in_slices > 0.4  # a quarter by chance


def test_a_sorted_neuron_keeps_its_gate():
    """The dense function does not see the order that entering gives."""
    recipe = GATED["dense_slices, swiglu"]
    _, order = jax.jit(recipe.enter)(W1, W2, X)
    sorted_w1, sorted_w2 = (sort_neurons(w[None], order[None])[0] for w in (W1, W2))
    dense = output(RECIPES["dense"](activation="swiglu"))
    assert np.abs(sorted_w1 - W1).max() > 0.1
    np.testing.assert_allclose(dense(X, W1, W2, None), dense(X, sorted_w1, sorted_w2, None), rtol=1e-4, atol=1e-4)


def test_recipes_that_do_not_compute_a_gate_refuse_it():
    for name, recipe in RECIPES.items():
        for activation in set(GATES) - set(recipe.computes):
            with pytest.raises(ValueError, match=f"recipe '{name}' computes .*, not {activation}"):
                recipe(activation=activation).ffn(jnp.ones((4, 24)), W1, W2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case, recipe in GATED.items() if recipe.products])
def test_best_implementation_is_as_accurate_as_the_reference(case):
    knobs = dict(v=128, m=16) if GATED[case].takes_order else {}
    assert_best_is_as_accurate_as_the_reference(dataclasses.replace(GATED[case], **knobs))
