import dataclasses

import numpy as np
import pytest

from sparse_lm.config import Config, MeshConfig, ModelConfig, SparsityConfig
from sparse_lm.recipes import DENSE, RECIPES, Recipe, SSte
from sparse_lm.training.telemetry.flops import dense_flops_per_token, executed_flops_per_token, utilisation

MODEL = ModelConfig(dim=24, layers=3, heads=6, kv_heads=2, ffn_dim=40, vocab_size=101)
MIXTURE = dict(experts=10, experts_per_token=3, expert_dim=20, shared_expert_dim=28, tie_embeddings=True)


def counted_by_hand(config: Config) -> float:
    """Forward and backward FLOPs of one sequence, product by product, over its tokens."""
    m, s = config.model, config.seq_len
    head = m.dim // m.heads

    def product(rows, inner, columns):
        return 2 * rows * inner * columns

    layer = product(s, m.dim, m.heads * head) + product(s, m.heads * head, m.dim)
    layer += 2 * product(s, m.dim, m.kv_heads * head)
    for query in range(s):
        layer += m.heads * (product(1, head, query + 1) + product(1, query + 1, head))
    matrices = 2 if m.activation == "squared_relu" else 3
    if m.experts:
        layer += product(s, m.dim, m.experts) + matrices * product(s, m.dim, m.shared_expert_dim)
        layer += m.experts_per_token * matrices * product(s, m.dim, m.expert_dim)
    else:
        layer += matrices * product(s, m.dim, m.ffn_dim)
    return 3 * (m.layers * layer + product(s, m.dim, m.vocab_size)) / s


@pytest.mark.parametrize("model", [{}, dict(activation="swiglu"), MIXTURE, dict(MIXTURE, activation="geglu")], ids=str)
@pytest.mark.parametrize("seq_len", [1, 17])
def test_dense_flops_by_hand(model, seq_len):
    config = Config(seq_len=seq_len, model=dataclasses.replace(MODEL, **model))
    np.testing.assert_allclose(dense_flops_per_token(config), counted_by_hand(config), rtol=1e-12)


class HalfOfOneProduct(Recipe):
    def work(self):
        return super().work() | {"grad_hidden": 0.5}


def saved(config, recipe):
    return dense_flops_per_token(config) - executed_flops_per_token(config, recipe)


@pytest.mark.parametrize("activation", ["squared_relu", "swiglu"])
def test_a_product_saves_its_own_share(activation):
    """Halving a product of W2 saves half of it: a sixth of the FFN's FLOPs, and with a gate a ninth of more of them."""
    config = Config(model=dataclasses.replace(MODEL, activation=activation))
    one_product = 2 * MODEL.ffn_dim * MODEL.dim * MODEL.layers
    np.testing.assert_allclose(saved(config, HalfOfOneProduct()), one_product / 2, rtol=1e-12)


def test_dense_layers_save_nothing():
    phases = [SparsityConfig(recipe=SSte(), dense_layers=n) for n in range(MODEL.layers + 1)]
    of_layers = [saved(Config(model=MODEL, sparsity=sparsity), SSte()) for sparsity in phases]
    expected = of_layers[0] * (1 - np.arange(MODEL.layers + 1) / MODEL.layers)
    np.testing.assert_allclose(of_layers, expected, atol=1e-9 * of_layers[0])


def test_sparse_experts_execute_half_of_the_experts_a_token_chooses():
    config = Config(model=dataclasses.replace(MODEL, **MIXTURE))
    experts = 6 * MODEL.layers * 3 * 2 * 20 * MODEL.dim
    np.testing.assert_allclose(saved(config, RECIPES["experts24"]()), experts / 2, rtol=1e-12)


@pytest.mark.parametrize("devices", [1, 8])
def test_utilisation_is_of_one_device_beside_its_peaks(devices):
    config = Config(model=MODEL, mesh=MeshConfig(data=devices))
    tokens_per_second = devices * 0.4 * 989e12 / dense_flops_per_token(config)
    assert utilisation(config, DENSE, tokens_per_second, "NVIDIA H100 80GB HBM3") == {
        "mfu": pytest.approx(0.4),
        "mfu_peak": 989e12,
        "executed_utilisation": pytest.approx(0.2),
        "executed_peak": 2 * 989e12,
    }


@pytest.mark.parametrize(
    "tokens_per_second, device_kind",
    [(None, "NVIDIA H200"), *((1e6, kind) for kind in ("cpu", "", "NVIDIA H100", "NVIDIA H100 80GB HBM3e", "TPU v4"))],
)
def test_utilisation_that_is_not_known_is_none(tokens_per_second, device_kind):
    found = utilisation(Config(model=MODEL), DENSE, tokens_per_second, device_kind)
    assert found == {"mfu": None, "executed_utilisation": None}
