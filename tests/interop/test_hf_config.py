"""config.json of other models; test_pretrained.py has round trips of our own."""

import pytest

from sparse_lm.interop.hf_config import from_hf_config, to_hf_config
from tests.interop.models import MODELS

ARCEE = to_hf_config(MODELS["grouped"], seq_len=64, end_of_text=0)
LLAMA = to_hf_config(MODELS["swiglu"], seq_len=64, end_of_text=0)
QWEN3 = to_hf_config(MODELS["qwen3"], seq_len=64, end_of_text=0)


def test_absent_keys_have_the_values_that_transformers_gives_them():
    needed = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"}
    small = {key: value for key, value in LLAMA.items() if key in needed | {"model_type"}}
    fixed = from_hf_config(small, gated=True)
    assert (fixed["kv_heads"], fixed["rope_theta"], fixed["norm_epsilon"]) == (fixed["heads"], 10_000.0, 1e-6)
    assert fixed["activation"] == "swiglu" and not fixed["tie_embeddings"]
    assert from_hf_config(small | {"model_type": "arcee"}, gated=False)["norm_epsilon"] == 1e-5
    qwen3 = from_hf_config(small | {"model_type": "qwen3"}, gated=True)
    assert (qwen3["kv_heads"], qwen3["head_dim"], qwen3["qk_norm"]) == (32, 128, True)


@pytest.mark.parametrize("key", ["rope_theta", "rope_parameters"])  # which transformers 4 and 5 read
def test_rope_of_either_version(key):
    ours = to_hf_config(MODELS["tied"], seq_len=64, end_of_text=0)
    kept = {name: value for name, value in ours.items() if name == key or not name.startswith("rope")}
    assert from_hf_config(kept | {"rope_scaling": None}, gated=False)["rope_theta"] == MODELS["tied"].rope_theta


def test_a_llama_without_gates_and_with_squared_relu_is_ours():
    assert from_hf_config(ARCEE | {"model_type": "llama"}, gated=False)["activation"] == "squared_relu"


@pytest.mark.parametrize(
    "hf, gated, message",
    [
        (ARCEE | {"model_type": "qwen2"}, False, "model_type = 'qwen2': must be 'arcee' or 'llama' or 'qwen3'"),
        (LLAMA | {"hidden_act": "gelu"}, True, "hidden_act = 'gelu': must be 'silu' or .* with gate"),
        (ARCEE | {"mlp_bias": True}, False, "mlp_bias = True: must be False"),
        (ARCEE | {"attention_bias": True}, False, "attention_bias = True: must be False"),
        (ARCEE | {"head_dim": "8"}, False, "head_dim = '8': must be a positive integer"),
        (QWEN3 | {"use_sliding_window": True}, True, "use_sliding_window = True: must be False"),
        (ARCEE | {"rope_parameters": {"rope_type": "llama3"}}, False, "rope_type = 'llama3': must be 'default'"),
        (ARCEE | {"rope_scaling": {"type": "linear"}}, False, "rope_type = 'linear': must be 'default'"),
        (ARCEE | {"rope_parameters": {"partial_rotary_factor": 0.5}}, False, r"partial_rotary_factor = 0\.5: must be"),
        (ARCEE | {"partial_rotary_factor": 0.5}, False, r"partial_rotary_factor = 0\.5: must be"),
        (ARCEE | {"quantization_config": {"quant_method": "fp8"}}, False, "quant_method = 'fp8': must be None"),
        (ARCEE | {"quantization_config": "bnb"}, False, "quantization_config = 'bnb': must be a group of keys"),
        (ARCEE | {"rope_parameters": {"rope_theta": "1e6"}}, False, "rope_theta = '1e6': must be a number"),
        (LLAMA | {"tie_word_embeddings": "false"}, True, "tie_word_embeddings = 'false': must be True or False"),
        ({k: v for k, v in ARCEE.items() if k != "vocab_size"}, False, "vocab_size = None: must be a positive integer"),
    ],
)
def test_other_models_are_refused_by_key(hf, gated, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config(hf, gated=gated)
