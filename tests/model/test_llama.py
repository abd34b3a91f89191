"""The whole model: against float64 numpy, its gradients, rematerialisation, causality, structure."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import config_rules
from sparse_lm.collectives import ONE_DEVICE
from sparse_lm.config import ModelConfig
from sparse_lm.model import attention, llama
from sparse_lm.model.loss import chunked_cross_entropy
from sparse_lm.recipes import Dense
from tests.model import numpy_llama
from tests.model.jaxprs import equations

SMALL = ModelConfig(dim=32, layers=3, heads=4, kv_heads=2, ffn_dim=64, vocab_size=50, dtype="float32", loss_chunk=7)
QWEN3 = dict(head_dim=12, qk_norm=True, norm_epsilon=1e-2)
MIXTURE = dict(experts=5, experts_per_token=2, expert_dim=16)


@functools.cache
def model(config, seed=0):
    """Structure and parameters, the norms' scales and routers' biases too at random values."""
    graphdef, params = llama.init(config, jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def perturb(path, x):
        if "bias" in jax.tree_util.keystr(path):
            return jnp.asarray(rng.uniform(-0.2, 0.2, x.shape), x.dtype)
        return x * jnp.asarray(rng.uniform(0.5, 1.5, x.shape), x.dtype) if "norm" in jax.tree_util.keystr(path) else x

    return graphdef, jax.tree_util.tree_map_with_path(perturb, params)


def windows(config, batch=2, length=11, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length), dtype=np.int32)


@functools.partial(jax.jit, static_argnames="graphdef")
def logits(graphdef, params, tokens):
    net = llama.merge(graphdef, params)
    return net.logits(net(tokens)[0])


def loss(graphdef, params, tokens, **options):
    net = llama.merge(graphdef, params)
    hidden, _ = net(tokens[:, :-1], **options)
    config = net.config
    hidden, targets = hidden.reshape(-1, config.dim), tokens[:, 1:].reshape(-1)
    return chunked_cross_entropy(hidden, net.unembedding(), targets, config.loss_chunk)


MODELS = [
    dict(kv_heads=1, rope_theta=500_000.0, ffn_dim=61),
    dict(kv_heads=4, tie_embeddings=True, activation="gated_relu2", layers=1),
    dict(activation="swiglu", rope_theta=100.0, norm_epsilon=1e-2),
    dict(activation="geglu", **QWEN3),
    MIXTURE,
    dict(MIXTURE, experts_per_token=5, shared_expert_dim=24, router_scores="sigmoid"),
    dict(MIXTURE, shared_expert_dim=16, router_scores="sigmoid", activation="swiglu", qk_norm=True),
]
"""Every activation, mixture and option of a model, in few models."""


@pytest.mark.parametrize("overrides", [*MODELS, dict(dtype="bfloat16")], ids=str)
def test_forward_matches_float64(overrides):
    config = dataclasses.replace(SMALL, **overrides)
    graphdef, params = model(config)
    tokens = windows(config)
    wanted = numpy_llama.forward(params, config, tokens)
    rtol, atol = (1e-4, 1e-5) if config.dtype == "float32" else (0, 0.05 * np.abs(wanted).max())
    np.testing.assert_allclose(logits(graphdef, params, tokens), wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        dict(tie_embeddings=True, activation="swiglu", **QWEN3),
        dict(MIXTURE, shared_expert_dim=24, experts_per_token=3, router_scores="sigmoid"),
        dict(MIXTURE, shared_expert_dim=16, activation="geglu"),
    ],
    ids=str,
)
def test_gradients_match_finite_differences(overrides):
    """Along a random direction of each parameter array, in float64."""
    config = dataclasses.replace(SMALL, layers=2, **overrides)
    graphdef, params = model(config)
    tokens = windows(config)
    gradient = jax.jit(jax.grad(functools.partial(loss, graphdef)))(params, tokens)
    leaves, structure = jax.tree.flatten(numpy_llama.to_float64(params))
    rng, step = np.random.default_rng(1), 1e-6
    for i, leaf in enumerate(leaves):
        direction = rng.normal(size=leaf.shape)

        def along(size, i=i, moved=direction):
            shifted = [x + size * moved if i == j else x for j, x in enumerate(leaves)]
            return numpy_llama.loss(jax.tree.unflatten(structure, shifted), config, tokens)

        slope = np.vdot(np.asarray(jax.tree.leaves(gradient)[i], np.float64), direction)
        np.testing.assert_allclose(slope, (along(step) - along(-step)) / (2 * step), rtol=1e-3, atol=1e-5)


def test_remat_policies_change_what_is_recomputed():
    tokens = windows(SMALL)
    products = {}
    for name in config_rules.REMAT_POLICIES:
        graphdef, params = model(dataclasses.replace(SMALL, remat=name, **MIXTURE))
        gradient = jax.grad(functools.partial(loss, graphdef))
        traced = equations(jax.make_jaxpr(gradient)(params, tokens).jaxpr)
        products[name] = sum(equation.primitive.name == "dot_general" for equation in traced)
    assert products["none"] < products["save_dots"] < products["full"]


def test_the_gradient_of_the_embedding_is_scattered_in_float32():
    graphdef, params = model(dataclasses.replace(SMALL, dtype="bfloat16"))
    embed = lambda params: llama.merge(graphdef, params).embed(windows(SMALL))  # noqa: E731
    gradient = jax.grad(lambda params: embed(params).astype(jnp.float32).sum())
    scatters = [e for e in equations(jax.make_jaxpr(gradient)(params).jaxpr) if e.primitive.name == "scatter-add"]
    assert [variable.aval.dtype for scatter in scatters for variable in scatter.outvars] == [jnp.float32]


def test_layers_share_one_compiled_body():
    def size(layers):
        config = dataclasses.replace(SMALL, layers=layers)
        graphdef, params = jax.eval_shape(functools.partial(llama.init, config), jax.random.key(0))
        gradient = jax.grad(functools.partial(loss, graphdef))
        return sum(1 for _ in equations(jax.make_jaxpr(gradient)(params, windows(config)).jaxpr))

    assert size(2) == size(7)


@pytest.mark.parametrize("overrides", [*MODELS, dict(precision="fp8")], ids=str)
def test_no_position_sees_a_later_one(overrides):
    config = dataclasses.replace(SMALL, **overrides)
    graphdef, params = model(config)
    tokens = windows(config)
    before = logits(graphdef, params, tokens)
    for t in range(1, tokens.shape[1]):
        changed = tokens.copy()
        changed[:, t:] = (changed[:, t:] + 1) % config.vocab_size
        after = logits(graphdef, params, changed)
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any(axis=-1).all()


def test_initial_parameters():
    config = dataclasses.replace(SMALL, dim=256, ffn_dim=512, vocab_size=1000, heads=4, kv_heads=2, layers=8)
    graphdef, params = jax.jit(functools.partial(llama.init, config))(jax.random.key(0))
    assert graphdef == llama.graphdef(config)
    deviations = jax.tree.map(np.std, params)
    residual = (2 * 8) ** -0.5
    wanted = {
        "embed": {"embedding": 256**-0.5},
        "layers": {
            "attention": {"q": 256**-0.5, "k": 256**-0.5, "v": 256**-0.5, "o": 256**-0.5 * residual},
            "attention_norm": 0.0,
            "ffn": {"up": 256**-0.5, "down": 512**-0.5 * residual},
            "ffn_norm": 0.0,
        },
        "norm": 0.0,
        "unembed": 256**-0.5,
    }
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0.02), deviations, wanted)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    up = np.asarray(params["layers"]["ffn"]["up"])
    assert (up[0] != up[1]).all()


class Sparse(Dense):
    """Computes densely, but counts as sparse."""

    products: ClassVar = {"up": "W1"}


class Spy(Sparse):
    """Returns what it is given as statistics."""

    takes_order = True

    def ffn(self, x, w1, w2, state, *, key, order, weights, layer, axes):
        assert (weights, axes) == (None, ONE_DEVICE)
        given = {"state": state, "key": jax.random.key_data(key), "layer": layer, "order": order}
        return x, given | {"kept_energy": jnp.float32(7)}


def test_each_layer_gets_its_own_state_and_key_and_the_first_can_stay_dense():
    graphdef, params = model(SMALL)

    @functools.partial(jax.jit, static_argnums=0)
    def statistics(dense_layers, params, key):
        options = dict(recipe=Spy(), recipe_state=jnp.array([1.0, 2.0, 3.0]), dense_layers=dense_layers)
        return llama.merge(graphdef, params)(windows(SMALL), key=key, **options)[1]

    stats = statistics(0, params, jax.random.key(0))
    np.testing.assert_array_equal(stats["state"], [1, 2, 3])
    np.testing.assert_array_equal(stats["layer"], [0, 1, 2])
    assert len({tuple(key.tolist()) for key in stats["key"]}) == SMALL.layers
    order = np.array(stats["order"])
    np.testing.assert_array_equal(np.sort(order), [np.arange(windows(SMALL).size)] * SMALL.layers)
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.3  # neighbours are parted
    assert (order != statistics(0, params, jax.random.key(1))["order"]).any()
    stats = statistics(2, params, jax.random.key(0))
    np.testing.assert_array_equal(stats["layer"], [0, 0, 2])  # what only sparse layers have is zero in dense ones
    assert stats["kept_energy"].tolist() == [1, 1, 7]


def test_dense_layers_train_as_in_a_dense_model():
    _, params = model(SMALL)

    def loss_and_gradient(config, **options):
        of_params = functools.partial(loss, llama.graphdef(config), tokens=windows(config), **options)
        return jax.jit(jax.value_and_grad(of_params))(params)

    dense = loss_and_gradient(SMALL)
    for unrolled in (False, True):
        config = dataclasses.replace(SMALL, unroll_layers=unrolled, remat="save_dots")
        parts = loss_and_gradient(config, recipe=Sparse(), dense_layers=2)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), parts, dense)


@pytest.mark.parametrize("policy", ["save_dots", "full"])
def test_gpu_step_lowers_with_flash_attention(monkeypatch, policy):
    """Forward and backward for CUDA, on a machine without it: only cuDNN's version must be made up."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(attention, "attention_implementation", lambda dtype, head_width: "cudnn")
    config = dataclasses.replace(SMALL, dtype="bfloat16", remat=policy)
    graphdef, params = model(config)
    step = jax.jit(jax.value_and_grad(functools.partial(loss, graphdef)))
    text = step.trace(params, windows(config, length=17)).lower(lowering_platforms=("cuda",)).as_text()
    # Once in the forward scan, again in the backward one if it is recomputed.
    assert text.count("@__cudnn$fmhaSoftmax(") == (2 if policy == "full" else 1)
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
