import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparse_lm.config import Config, OptimizerConfig
from sparse_lm.training.optimizer import make_optimizer
from sparse_lm.training.schedule import learning_rate

CONFIG = Config(steps=50, optimizer=OptimizerConfig(warmup_steps=5, clip_norm=0.7, weight_decay=0.3))


def random_params(seed: int, scale: float = 1.0) -> dict:
    """Parameters laid out as the model's, layers stacked."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return {
        "embed": {"embedding": draw(7, 4)},
        "layers": {
            "attention": {"q": draw(2, 4, 4)},
            "attention_norm": draw(2, 4),
            "ffn": {"up": draw(2, 8, 4), "down": draw(2, 8, 4)},
            "ffn_norm": draw(2, 4),
        },
        "norm": draw(4),
        "unembed": draw(7, 4),
    }


def is_norm(path) -> bool:
    return "norm" in jax.tree_util.keystr(path)


def numpy_adamw(params: dict, gradients: list[dict]) -> dict:
    """AdamW with clipping by global norm, in float64."""
    options, rate = CONFIG.optimizer, learning_rate(CONFIG)
    leaves = jax.tree.leaves_with_path(params)
    values = [np.asarray(leaf, np.float64) for _, leaf in leaves]
    first, second = ([np.zeros_like(v) for v in values] for _ in range(2))
    for step, gradient in enumerate(gradients):
        grads = [np.asarray(g, np.float64) for g in jax.tree.leaves(gradient)]
        norm = np.sqrt(sum(np.sum(g**2) for g in grads))
        for i, (path, _) in enumerate(leaves):
            g = grads[i] * min(1.0, options.clip_norm / norm)
            first[i] = options.beta1 * first[i] + (1 - options.beta1) * g
            second[i] = options.beta2 * second[i] + (1 - options.beta2) * g**2
            m = first[i] / (1 - options.beta1 ** (step + 1))
            v = second[i] / (1 - options.beta2 ** (step + 1))
            decay = 0.0 if is_norm(path) else options.weight_decay * values[i]
            values[i] = values[i] - float(rate(step)) * (m / (np.sqrt(v) + options.epsilon) + decay)
    return jax.tree.unflatten(jax.tree.structure(params), values)


def test_three_steps_are_adamw():
    """Gradients large and small, so that clipping does and does not bite."""
    params, gradients = random_params(0), [random_params(seed, 10.0 ** (1 - seed)) for seed in (1, 2, 3)]
    optimizer = make_optimizer(CONFIG)
    state, trained = optimizer.init(params), params
    for gradient in gradients:
        updates, state = jax.jit(optimizer.update)(gradient, state, trained)
        trained = optax.apply_updates(trained, updates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), trained, numpy_adamw(params, gradients)
    )


def test_moments_are_float32_for_bfloat16_gradients():
    params = random_params(0)
    optimizer = make_optimizer(CONFIG)
    gradient = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    updates, state = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)
    moments = jax.tree.leaves([optax.tree.get(state, name) for name in ("mu", "nu")])
    assert {leaf.dtype for leaf in moments + jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}


def test_after_clip_sees_clipped_gradients_and_keyword_arguments():
    params = random_params(0)

    def update(updates, state, params, *, factor):
        return jax.tree.map(lambda g: factor * g, updates), state

    after_clip = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    optimizer = make_optimizer(CONFIG, after_clip)
    _, state = jax.jit(optimizer.update)(random_params(1, 100.0), optimizer.init(params), params, factor=3.0)
    first_moment = (1 - CONFIG.optimizer.beta1) * 3.0 * CONFIG.optimizer.clip_norm
    np.testing.assert_allclose(optax.tree.norm(optax.tree.get(state, "mu")), first_moment, rtol=1e-5)
