import dataclasses
import math

import jax
import numpy as np
import pytest

from sparse_lm.config import Config, ModelConfig, SparsityConfig
from sparse_lm.model import llama
from sparse_lm.recipes import Act24, Venom
from sparse_lm.training import ffn_weights
from sparse_lm.training.evaluation import Evaluation
from tests.model.numpy_llama import cross_entropy
from tests.model.test_llama import logits

MODEL = ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32, vocab_size=61, dtype="float32", loss_chunk=24)
CONFIG = Config(batch_size=4, seq_len=9, model=MODEL)
WINDOWS = np.random.default_rng(0).integers(0, 61, (11, 10)).astype(np.int32)
BYTES_PER_TOKEN = np.random.default_rng(1).integers(0, 7, 61).astype(np.int32)


@pytest.fixture(scope="module")
def model():
    return llama.init(MODEL, jax.random.key(0))


def batches(windows: np.ndarray, size: int) -> list[np.ndarray]:
    return [windows[start : start + size] for start in range(0, len(windows), size)]


def evaluate(model, windows: np.ndarray = WINDOWS, config: Config = CONFIG) -> dict[str, float]:
    graphdef, params = model
    return Evaluation(config, graphdef, BYTES_PER_TOKEN)(params, None, batches(windows, config.batch_size))


def test_loss_perplexity_and_bits_per_byte_by_definition(model):
    targets = WINDOWS[:, 1:]
    nats = cross_entropy(np.asarray(logits(*model, WINDOWS[:, :-1]), np.float64), targets)
    bits_per_byte = nats.sum() / math.log(2) / BYTES_PER_TOKEN[targets].sum()
    expected = dict(loss=nats.mean(), perplexity=math.exp(nats.mean()), bits_per_byte=bits_per_byte)
    assert evaluate(model) == pytest.approx(expected, rel=1e-5)


def test_short_last_batch_counts_its_own_windows_only(model):
    """11 windows in batches of 4, of which the last has 3; and one that holds them all."""
    whole = evaluate(model, config=dataclasses.replace(CONFIG, batch_size=11))
    assert evaluate(model) == pytest.approx(whole, rel=1e-6)
    assert evaluate(model, WINDOWS[:1])["loss"] != pytest.approx(whole["loss"], rel=1e-3)


def test_sparse_evaluation_leaves_dense_layers_dense(model):
    graphdef, params = model
    up, down = ffn_weights.matrices(params)
    params = ffn_weights.with_matrices(params, up.at[1].set(0), down)  # the second FFN adds nothing

    def sparse_loss(dense_layers):
        sparsity = SparsityConfig(recipe=Act24(), dense_layers=dense_layers)
        run = Evaluation(dataclasses.replace(CONFIG, sparsity=sparsity), graphdef, BYTES_PER_TOKEN, Act24())
        return run(params, None, batches(WINDOWS, 4))["loss"]

    dense = evaluate((graphdef, params))["loss"]
    assert sparse_loss(1) == pytest.approx(dense, rel=1e-6)
    assert sparse_loss(0) != pytest.approx(dense, rel=1e-4)


def test_what_is_trained_in_blocks_of_tokens_is_evaluated_token_by_token(model):
    """Windows that come in other batches have the same loss."""
    graphdef, params = model
    recipe = Venom(v=4, m=8, experts=2)
    state, _ = jax.jit(jax.vmap(recipe.enter))(*ffn_weights.matrices(params))
    run = Evaluation(CONFIG, graphdef, BYTES_PER_TOKEN, recipe)
    found, other = (run(params, state, batches(windows, 4)) for windows in (WINDOWS, WINDOWS[::-1]))
    assert found == pytest.approx(other, rel=1e-6)
