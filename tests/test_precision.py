"""A model in FP8: what it computes is near what bf16 computes.

tests/model/test_llama.py says that it is causal, tests/recipes/test_ffn.py which products round what, and
tests/test_faults.py that it trains through both phases.
"""

import shutil

import jax
import numpy as np
import pytest

from sparse_lm.errors import ConfigError
from sparse_lm.evaluate import evaluate, text_model
from sparse_lm.generate import continue_texts
from sparse_lm.model import llama
from sparse_lm.ops import fp8
from sparse_lm.training.loop import train
from sparse_lm.training.workdir import load_config, save_config
from tests import small
from tests.ops.numpy_fp8 import rounded
from tests.ops.operands import relative_error
from tests.runs import small_config

FP8 = {"model.precision": "fp8"}


def hidden_states(config, params, tokens):
    model = llama.merge(llama.graphdef(config.model), params)
    return np.asarray(jax.jit(lambda tokens: model(tokens)[0])(tokens))


@pytest.mark.long
@pytest.mark.parametrize("changes, of_ffn", [({}, ("up", "down")), (small.MIXTURE, ("shared_up", "shared_down"))])
def test_every_linear_layer_but_experts_is_in_fp8_and_near_its_own_bf16(changes, of_ffn):
    """Weights that are rounded to e4m3 beforehand change nothing: every product rounds its own."""
    gated = {"model.activation": "swiglu"} | changes
    config = small.config("dense", **FP8, **gated)
    params = small.compiled(config)[0].init().params
    tokens = small.windows(config)[:, :-1]
    found = hidden_states(config, params, tokens)
    exact = hidden_states(small.config("dense", **gated), params, tokens)
    assert 1e-3 < relative_error(found, exact) < 0.2  # of 32 inputs, whose errors hardly cancel
    moved = jax.tree.map(lambda w: w, params)
    for group, names in (("attention", "qkvo"), ("ffn", of_ffn)):
        for name in names:
            w = np.array(moved["layers"][group][name])
            moved["layers"][group][name] = np.stack([rounded(layer, None) for layer in w])
    np.testing.assert_allclose(hidden_states(config, moved, tokens), found, rtol=1e-5, atol=1e-5)
    if config.model.experts:
        up = moved["layers"]["ffn"]["up"]
        moved["layers"]["ffn"]["up"] = np.stack([rounded(np.array(layer), None) for layer in up])
        assert relative_error(hidden_states(config, moved, tokens), found) > 1e-4


@pytest.mark.parametrize(
    "use",
    [
        lambda run: train(load_config(run), str(run)),
        evaluate,
        lambda run: text_model(run, "latest", 64),
        lambda run: continue_texts(run, [""], max_new_tokens=1),
    ],
)
def test_fp8_is_refused_where_there_is_none(monkeypatch, corpus, tmp_path, use):
    monkeypatch.setattr(fp8, "unavailable", lambda: "needs compute capability 8.9 or more; A100 has 8.0")
    save_config(tmp_path, small_config(corpus, "dense", **FP8))
    shutil.copy(corpus / "tokenizer.json", tmp_path)
    with pytest.raises(ConfigError, match=r"config.model.precision = 'fp8': needs compute.*allowed here: bf16"):
        use(tmp_path)
    assert not (tmp_path / "checkpoints").exists()
