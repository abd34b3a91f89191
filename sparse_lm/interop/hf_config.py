"""A model's configuration as transformers' config.json states it, and back.

Squared ReLU without a gate is transformers' Arcee, a gate its Llama, or with queries and keys normed its Qwen3. A
mixture of gated experts is its Glm4Moe where scores are sigmoids, and its Ernie4_5_Moe where they are a softmax, which
rotates neighbours where the others rotate halves. All else is the same: RMSNorm before each block, rotary positions,
grouped key-value heads, no biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_lm.config import ModelConfig
from sparse_lm.errors import ConfigError
from sparse_lm.ops.activations import GATES

_OURS = {"squared_relu": "relu2", "swiglu": "silu", "geglu": "gelu_pytorch_tanh", "gated_relu2": "relu2"}
"""hidden_act, by `ModelConfig.activation`."""

_CLASSES = {
    "arcee": "Arcee", "llama": "Llama", "qwen3": "Qwen3", "glm4_moe": "Glm4Moe", "ernie4_5_moe": "Ernie4_5_Moe"
}  # fmt: skip
"""Names the class of an architecture, less "ForCausalLM", by model_type."""

_ABSENT = {
    "arcee": {"hidden_act": "relu2", "rms_norm_eps": 1e-5},
    "llama": {"hidden_act": "silu", "rms_norm_eps": 1e-6},
    "qwen3": {"hidden_act": "silu", "rms_norm_eps": 1e-6, "head_dim": 128, "num_key_value_heads": 32},
}
"""The values that transformers takes for keys that a config.json leaves out, by its model_type."""


def check_has_architecture(model: ModelConfig) -> None:
    """Raises ConfigError, naming the key, for a model that no architecture of transformers computes."""
    gated, width = model.activation in GATES, model.expert_dim
    if not model.experts:
        whole = model.qk_norm or model.dim % model.heads == 0  # else transformers 5 refuses an Arcee and a Llama
        rules = [
            ("qk_norm", gated or not model.qk_norm, "False without a gate"),
            ("heads", whole, f"a divisor of model.dim = {model.dim} without model.qk_norm"),
        ]
    else:
        rules = [
            ("activation", gated, f"one of {', '.join(GATES)} with model.experts"),
            ("qk_norm", rotates_halves(model) or not model.qk_norm, "False with model.router_scores = 'softmax'"),
            ("shared_expert_dim", model.shared_expert_dim % width == 0, f"a multiple of model.expert_dim = {width}"),
        ]
    for key, ok, allowed in rules:
        if not ok:
            reason = f"must be {allowed} to export: transformers has no other such architecture"
            raise ConfigError(f"model.{key}", getattr(model, key), reason)


def rotates_halves(model: ModelConfig) -> bool:
    """Returns True if positions rotate the two halves of a head, as here, and not each two neighbours."""
    return not model.experts or model.router_scores == "sigmoid"


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Names the class, model_type and activation of a model that `check_has_architecture` lets pass."""
    if model.experts:
        kind = "glm4_moe" if rotates_halves(model) else "ernie4_5_moe"
    elif model.activation in GATES:
        kind = "qwen3" if model.qk_norm else "llama"
    else:
        kind = "arcee"
    names = [f"{_CLASSES[kind]}ForCausalLM"]
    return {"architectures": names, "model_type": kind, "hidden_act": _OURS[model.activation]}


def to_hf_config(model: ModelConfig, *, seq_len: int, end_of_text: int) -> dict[str, Any]:
    """Makes the config.json of a model with float32 weights, `seq_len` being the tokens of a training sequence."""
    rope = {"rope_type": "default", "rope_theta": model.rope_theta}
    return {
        **architecture(model),
        **(_mixture(model) if model.experts else {}),
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        "max_position_embeddings": seq_len,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,  # read up to transformers 4, and by most other programs
        "rope_parameters": rope | ({"partial_rotary_factor": 1.0} if model.experts else {}),  # by transformers 5
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "use_cache": True,
        "torch_dtype": "float32",
        "dtype": "float32",
    }


def _mixture(model: ModelConfig) -> dict[str, Any]:
    """Makes the keys that mixtures have besides: experts in every layer, all in one group; one token is predicted."""
    shared = model.shared_expert_dim // model.expert_dim
    if not rotates_halves(model):
        return {
            "moe_num_experts": model.experts,
            "moe_k": model.experts_per_token,
            "moe_intermediate_size": model.expert_dim,
            "moe_num_shared_experts": shared,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 1,
            "use_bias": False,
        }
    return {
        "n_routed_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_dim,
        "n_shared_experts": shared,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "num_nextn_predict_layers": 0,
        "use_qk_norm": model.qk_norm,
        "partial_rotary_factor": 1.0,
    }


def from_hf_config(hf: Mapping[str, Any], *, gated: bool) -> dict[str, Any]:
    """Returns the keys of `ModelConfig` that a config.json decides.

    `gated` says whether the weights have gate projections. transformers' Llama always has; without, one with hidden_act
    "relu2" is an Arcee by another name.

    Raises:
      ValueError: the model family has no such model, or a size is missing. It names key, value and what is allowed.
    """
    kind = hf.get("model_type")
    _allow("model_type", kind, tuple(_ABSENT))
    hf = _ABSENT[kind] | dict(hf)
    for key in ("rope_scaling", "rope_parameters", "quantization_config"):
        _checked(key, hf.get(key), isinstance(hf.get(key) or {}, Mapping), "must be a group of keys")
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}  # of both, either version reads the first
    _refuse_variants(hf, rope)
    dim, heads = _count(hf, "hidden_size"), _count(hf, "num_attention_heads")
    head_dim = _count(hf, "head_dim") if hf.get("head_dim") else 0
    return {
        "dim": dim,
        "layers": _count(hf, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": _count(hf, "num_key_value_heads") if hf.get("num_key_value_heads") else heads,
        "head_dim": 0 if head_dim * heads == dim else head_dim,
        "qk_norm": kind == "qwen3",
        "ffn_dim": _count(hf, "intermediate_size"),
        "vocab_size": _count(hf, "vocab_size"),
        "activation": _activation(hf["hidden_act"], gated),
        "rope_theta": _number("rope_theta", rope.get("rope_theta", hf.get("rope_theta", 10_000.0))),
        "norm_epsilon": _number("rms_norm_eps", hf["rms_norm_eps"]),
        "tie_embeddings": hf.get("tie_word_embeddings") or False,
    }


def _activation(name: str, gated: bool) -> str:
    name = {"squared_relu": "relu2", "swish": "silu"}.get(str(name), name)
    ours = {theirs: ours for ours, theirs in _OURS.items() if (ours in GATES) == gated}
    _allow("hidden_act", name, tuple(ours), f" {'with' if gated else 'without'} gate projections")
    return ours[name]


def _refuse_variants(hf: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """Refuses keys that change what a Llama computes."""
    _allow("attention_bias", hf.get("attention_bias", False), (False,))
    _allow("mlp_bias", hf.get("mlp_bias", False), (False,))
    _allow("tie_word_embeddings", hf.get("tie_word_embeddings"), (True, False, None))
    quantization = (hf.get("quantization_config") or {}).get("quant_method")
    _allow("quant_method", quantization, (None,), " (weights are read as they are)")
    _allow("use_sliding_window", hf.get("use_sliding_window") or False, (False,), " (attention sees all positions)")
    _allow("rope_type", rope.get("rope_type", rope.get("type", "default")), ("default",), " (positions are not scaled)")
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    _allow("partial_rotary_factor", partial, (1.0,))


def _count(hf: Mapping[str, Any], key: str) -> int:
    value = hf.get(key)
    return _checked(key, value, type(value) is int and value > 0, "must be a positive integer")


def _number(key: str, value: Any) -> float:
    return _checked(key, value, type(value) in (int, float), "must be a number")


def _allow(key: str, value: Any, allowed: tuple, why: str = "") -> None:
    _checked(key, value, value in allowed, f"must be {' or '.join(map(repr, allowed))}{why}")


def _checked(key: str, value: Any, ok: bool, allowed: str) -> Any:
    if not ok:
        raise ValueError(f"config.json has {key} = {value!r}: {allowed}")
    return value
