"""A model in FP8: what it computes is near what bf16 computes, causal, and trains through both phases."""

import dataclasses

import jax
import numpy as np
import pytest

from sparse_lm import evaluate
from sparse_lm.config import ConfigError
from sparse_lm.model import llama
from sparse_lm.ops import fp8
from sparse_lm.recipes import DENSE
from sparse_lm.recipes.base import NoState
from sparse_lm.training.loop import train
from sparse_lm.training.telemetry.metrics import read_metrics
from tests import small
from tests.recipes import examples
from tests.recipes.examples import DO, KEY, ORDER, W1, W2, X
from tests.runs import small_config

FP8 = {"model.precision": "fp8"}
PERTURBED = 20  # the first position that changes, of 32


def hidden_states(config, params, tokens):
    model = llama.merge(llama.graphdef(config.model), params)
    return np.asarray(jax.jit(lambda tokens: model(tokens)[0])(tokens))


@pytest.mark.long
def test_every_linear_layer_is_in_fp8_and_near_its_own_bf16():
    """Weights that are rounded to e4m3 beforehand change nothing: every product rounds its own."""
    gated = {"model.activation": "swiglu"}
    config = small.config("dense", **FP8, **gated)
    params = small.compiled(config)[0].init().params
    tokens = small.windows(config)[:, :-1]
    found = hidden_states(config, params, tokens)
    exact = hidden_states(small.config("dense", **gated), params, tokens)
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 1e-3 < error < 0.2  # of 32 inputs, whose errors hardly cancel
    moved = jax.tree.map(lambda w: w, params)
    for group, names in (("attention", "qkvo"), ("ffn", ("up", "down"))):
        for name in names:
            w = np.array(moved["layers"][group][name])
            moved["layers"][group][name] = np.stack([_rounded(fp8.whole(layer)) for layer in w])
    np.testing.assert_allclose(hidden_states(config, moved, tokens), found, rtol=1e-5, atol=1e-5)


def _rounded(scaled):
    """Multiplies out what e4m3 holds of a matrix."""
    return np.asarray(scaled.values, np.float32) * np.asarray(scaled.scale)


def test_all_products_of_a_dense_ffn_are_of_what_e4m3_holds():
    recipe = dataclasses.replace(DENSE, precision=fp8.PRECISION)
    o, dx, dw1, dw2, _ = examples.outputs_and_gradients(recipe)(X, W1, W2, DO, NoState(), KEY, ORDER)

    def rows(x):
        return _rounded(fp8.by_rows(x))

    def weight_gradient(a, b):
        scale = fp8.by_rows(a).scale
        return (rows(a) / scale).T @ _rounded(fp8.by_columns(b * scale))

    w1, w2 = (_rounded(fp8.whole(w)) for w in (W1, W2))
    h = rows(X) @ w1.T
    y = np.square(np.maximum(h, 0))
    dh = (rows(DO) @ w2.T) * 2 * np.maximum(h, 0)
    expected = rows(y) @ w2, rows(dh) @ w1, weight_gradient(dh, X), weight_gradient(y, DO)
    for found, exact in zip((o, dx, dw1, dw2), expected, strict=True):
        # Sums in another order move a few numbers to the next of e4m3.
        assert np.linalg.norm(found - exact) < 2e-3 * np.linalg.norm(exact)


def test_no_output_depends_on_a_later_token():
    config = small.config("dense", **FP8)
    params = small.compiled(config)[0].init().params
    tokens = small.windows(config)[:, :-1]
    changed = tokens.copy()
    changed[:, PERTURBED:] = (tokens[:, PERTURBED:] + 1) % config.model.vocab_size
    before, after = hidden_states(config, params, tokens), hidden_states(config, params, changed)
    np.testing.assert_array_equal(before[:, :PERTURBED], after[:, :PERTURBED])
    assert np.abs(before[:, PERTURBED:] - after[:, PERTURBED:]).max() > 0.1


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["slices", "act24"])
def test_a_run_trains_in_fp8_around_and_in_its_sparse_phase(recipe, corpus, tmp_path):
    assert train(small_config(corpus, recipe, **FP8), str(tmp_path / "fp8"))
    losses = [line["loss"] for line in read_metrics(tmp_path / "fp8")]
    assert losses[-1] < losses[0] - 2
    assert abs(evaluate.evaluate(str(tmp_path / "fp8"))["loss"] - losses[-1]) < 1


def test_fp8_is_refused_where_there_is_none(monkeypatch, corpus, tmp_path):
    monkeypatch.setattr(fp8, "unavailable", lambda: "needs compute capability 8.9 or more; A100 has 8.0")
    with pytest.raises(ConfigError, match=r"config.model.precision = 'fp8': needs compute.*allowed here: bf16"):
        train(small_config(corpus, "dense", **FP8), str(tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("changes, why", [({"model.precision": "fp4"}, "bf16"), ({**FP8, **small.MIXTURE}, "no FP8")])
def test_bad_precisions_are_refused_by_name(changes, why):
    with pytest.raises(ConfigError, match=rf"config.model.precision = .*{why}"):
        small.config("dense", **changes)
