"""Whole runs of models with gates: dense, sparse, dense; stopped and resumed; exported while sparse."""

import json

import jax
import pytest

from sparse_lm import evaluate, export
from sparse_lm.training.loop import train
from tests.runs import Crash, crash_before, lines, small_config, trace


def train_and_resume(config, tmp_path, monkeypatch):
    """Trains a run, and the same in two parts, of which the first ends within the sparse phase."""
    run = tmp_path / "run"
    assert train(config, str(run))
    logged = lines(run)
    assert [line["phase"] for line in logged] == ["dense"] * 4 + ["sparse"] * 4 + ["dense"] * 4
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert evaluate.evaluate(str(run))["loss"] == pytest.approx(logged[-1]["eval_loss"], rel=1e-6)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        crash_before(patch, 7)
        train(config, str(tmp_path / "stopped"))
    assert train(config, str(tmp_path / "stopped"))
    assert trace(tmp_path / "stopped") == trace(run)
    return run


@pytest.mark.long
def test_a_gated_model_trains_sparsely_and_resumes_as_if_it_had_not_stopped(corpus, tmp_path, monkeypatch):
    """And so does Muon, whose state has no second moments of the layers' matrices."""
    gated = {"model.activation": "swiglu", "model.qk_norm": True}
    config = small_config(corpus, "sste", **gated, **{"optimizer.name": "muon", "keep_checkpoints": 4})
    run = train_and_resume(config, tmp_path, monkeypatch)

    export.export(run, tmp_path / "hf", checkpoint=6, weight_format="sparse24")
    hf_config = json.loads((tmp_path / "hf" / "sparse24" / "config.json").read_text())
    assert hf_config["architectures"] == ["Qwen3ForCausalLM"]
    compressed = jax.tree.leaves(hf_config["quantization_config"])
    assert {f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")} <= set(compressed)


@pytest.mark.long
def test_a_gated_model_whose_tokens_are_routed_resumes_as_if_it_had_not_stopped(corpus, tmp_path, monkeypatch):
    """And so do moments in bfloat16."""
    changes = {"model.activation": "gated_relu2", "optimizer.moments": "bfloat16"}
    train_and_resume(small_config(corpus, "slices", **changes), tmp_path, monkeypatch)
