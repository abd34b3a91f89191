"""Whole runs of models with gates: dense, sparse, dense; stopped and resumed; exported while sparse."""

import json

import jax
import pytest

from sparse_lm import evaluate, export
from sparse_lm.training.loop import train
from sparse_lm.training.telemetry.metrics import read_metrics
from tests.runs import Crash, compiled_once, crash_before, small_config, trace


def test_a_gated_model_trains_sparsely_and_leaves_with_its_gate(corpus, tmp_path):
    config = small_config(corpus, "sste", **{"model.activation": "swiglu", "keep_checkpoints": 4})
    assert train(config, str(tmp_path / "run"))
    lines = list(read_metrics(tmp_path / "run"))
    assert [line["phase"] for line in lines] == ["dense"] * 4 + ["sparse"] * 4 + ["dense"] * 4
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert evaluate.evaluate(str(tmp_path / "run"))["loss"] > 0

    export.export(tmp_path / "run", tmp_path / "hf", checkpoint=6, weight_format="sparse24")
    hf_config = json.loads((tmp_path / "hf" / "sparse24" / "config.json").read_text())
    assert hf_config["architectures"] == ["LlamaForCausalLM"]
    compressed = jax.tree.leaves(hf_config["quantization_config"])
    assert {f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")} <= set(compressed)


@compiled_once()
def test_a_run_that_routes_gates_resumes_as_if_it_had_not_stopped(corpus, tmp_path, monkeypatch):
    """And so does Muon, whose state has no second moments of the layers' matrices."""
    gated = {"model.activation": "swiglu", "model.qk_norm": True}
    config = small_config(corpus, "dense_slices", **gated, **{"optimizer.name": "muon"})
    assert train(config, str(tmp_path / "whole"))
    with monkeypatch.context() as patch, pytest.raises(Crash):
        crash_before(patch, 7)
        train(config, str(tmp_path / "stopped"))
    assert train(config, str(tmp_path / "stopped"))
    whole = trace(tmp_path / "whole")
    assert trace(tmp_path / "stopped") == whole
    assert [line["phase"] for line in whole] == ["dense"] * 4 + ["sparse"] * 4 + ["dense"] * 4
    assert whole[-1]["loss"] < whole[0]["loss"]
    assert "expert_load" in str(whole[5])
