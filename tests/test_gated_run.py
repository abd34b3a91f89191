"""A whole run of a model with gates: dense, sparse, dense; exported while it is sparse."""

import json

import jax

from sparse_lm import evaluate, export
from sparse_lm.training.loop import train
from sparse_lm.training.telemetry.metrics import read_metrics
from tests.runs import small_config


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
