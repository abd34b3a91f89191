import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sparse_lm.config import Config, OptimizerConfig
from sparse_lm.training.optimizer import learning_rate, make_optimizer

CONFIG = Config(steps=50, optimizer=OptimizerConfig(warmup_steps=5, clip_norm=0.7, weight_decay=0.3))
MUON = dataclasses.replace(CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, name="muon"))


def random_params(seed: int, scale: float = 1.0) -> dict:
    """Parameters laid out as the model's, layers stacked."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)  # noqa: E731
    layers = {"attention": {"q": draw(2, 4, 4)}, "ffn": {"up": draw(2, 8, 4), "down": draw(2, 8, 4)}}
    layers |= {"attention_norm": draw(2, 4), "ffn_norm": draw(2, 4)}
    return {"embed": {"embedding": draw(7, 4)}, "layers": layers, "norm": draw(4), "unembed": draw(7, 4)}


def orthogonalised(matrix):
    """Five quintic Newton-Schulz steps towards the nearest orthogonal matrix, by its singular values."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    s /= np.sqrt(np.sum(s**2))
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


def numpy_updates(config: Config, params: dict, gradients: list[dict]) -> dict:
    """AdamW, or Muon for the layers' matrices, with clipping by global norm and a decay after it, in float64."""
    options, rate = config.optimizer, learning_rate(config)
    leaves = jax.tree.leaves_with_path(params)
    values = [np.asarray(leaf, np.float64) for _, leaf in leaves]
    first, second, momentum = ([np.zeros_like(v) for v in values] for _ in range(3))
    for step, gradient in enumerate(gradients):
        grads = [np.asarray(g, np.float64) for g in jax.tree.leaves(gradient)]
        norm = np.sqrt(sum(np.sum(g**2) for g in grads))
        for i, (path, _) in enumerate(leaves):
            g = grads[i] * min(1.0, options.clip_norm / norm) + 0.1 * values[i]
            first[i] = options.beta1 * first[i] + (1 - options.beta1) * g
            second[i] = options.beta2 * second[i] + (1 - options.beta2) * g**2
            if options.name == "muon" and values[i].ndim == 3:
                momentum[i] = 0.95 * momentum[i] + 0.05 * g
                ahead = 0.95 * momentum[i] / (1 - 0.95 ** (step + 2)) + 0.05 * g / (1 - 0.95 ** (step + 1))
                update = 0.2 * np.sqrt(max(g.shape[1:])) * np.stack([orthogonalised(layer) for layer in ahead])
            else:
                m = first[i] / (1 - options.beta1 ** (step + 1))
                v = second[i] / (1 - options.beta2 ** (step + 1))
                update = m / (np.sqrt(v) + options.epsilon)
            decay = 0.0 if "norm" in jax.tree_util.keystr(path) else options.weight_decay * values[i]
            values[i] = values[i] - float(rate(step)) * (update + decay)
    return jax.tree.unflatten(jax.tree.structure(params), values)


@pytest.mark.parametrize("config, tolerance", [(CONFIG, 1e-6), (MUON, 1e-5)], ids=["adamw", "muon"])
def test_three_steps_are_those_of_the_formulas(config, tolerance):
    """Gradients large and small, so that clipping does and does not bite."""
    params, gradients = random_params(0), [random_params(seed, 10.0 ** (1 - seed)) for seed in (1, 2, 3)]
    optimizer = make_optimizer(config, after_clip=optax.add_decayed_weights(0.1))
    state, trained = optimizer.init(params), params
    for gradient in gradients:
        updates, state = jax.jit(optimizer.update)(gradient, state, trained)
        trained = optax.apply_updates(trained, updates)
    assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=tolerance)
    jax.tree.map(assert_close, trained, numpy_updates(config, params, gradients))


def test_moments_in_bfloat16_train_as_those_in_float32():
    """Over many steps, in which roundings could add up, updates of random gradients are off by a few of them."""
    rounded = dataclasses.replace(CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, moments="bfloat16"))
    params, rng = random_params(0), np.random.default_rng(1)
    optimizers = [make_optimizer(config) for config in (CONFIG, rounded)]
    states = [optimizer.init(params) for optimizer in optimizers]
    steps = [jax.jit(optimizer.update) for optimizer in optimizers]
    for _ in range(20):
        gradient = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape) + 0.3, jnp.float32), params)
        wanted, states[0] = steps[0](gradient, states[0], params)
        found, states[1] = steps[1](gradient, states[1], params)
        error = optax.tree.norm(optax.tree.sub(found, wanted)) / optax.tree.norm(wanted)
        assert error < 0.02
    assert error > 0
    # Steps are counted exactly: bfloat16 would count to 256.
    kinds = {(leaf.dtype.name, leaf.ndim > 0) for leaf in jax.tree.leaves(states[1])}
    assert kinds == {("bfloat16", True), ("int32", False)}


def rates(**options) -> np.ndarray:
    """The rate of every step of a run of 40: it rises for 8 steps on a straight line, and stays after the last one."""
    options |= dict(learning_rate=2e-3, warmup_steps=8)
    schedule = learning_rate(Config(steps=40, optimizer=OptimizerConfig(**options)))
    rate = np.asarray(jax.vmap(schedule)(np.arange(40)))
    np.testing.assert_allclose(rate[:8], 2e-3 * np.arange(1, 9) / 8, rtol=1e-6)
    np.testing.assert_allclose(schedule(1000), rate[39], rtol=1e-6)
    return rate


def test_cosine_is_half_a_period_that_ends_with_the_last_step():
    rate = rates(schedule="cosine", final_fraction=0.1)
    expected = 2e-3 * (0.1 + 0.9 * (1 + np.cos(math.pi * np.arange(1, 33) / 32)) / 2)
    np.testing.assert_allclose(rate[8:], expected, rtol=1e-5)
    np.testing.assert_allclose(rate[-1], 2e-4, rtol=1e-5)


def test_wsd_is_flat_then_falls_on_a_straight_line():
    rate = rates(schedule="wsd", decay_steps=10, final_fraction=0.0)
    np.testing.assert_allclose(rate[7:30], 2e-3, rtol=1e-6)
    np.testing.assert_allclose(rate[30:], 2e-3 * np.arange(9, -1, -1) / 10, rtol=1e-5, atol=1e-9)
