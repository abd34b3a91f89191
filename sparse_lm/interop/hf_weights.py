"""Maps our parameters to transformers' tensors."""

from __future__ import annotations

import functools

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from sparse_lm.config import ModelConfig
from sparse_lm.interop.hf_config import rotates_halves
from sparse_lm.model import llama, mixture
from sparse_lm.ops.activations import GATES

_LAYER = {
    ("attention_norm",): "input_layernorm",
    ("attention", "q"): "self_attn.q_proj",
    ("attention", "k"): "self_attn.k_proj",
    ("attention", "v"): "self_attn.v_proj",
    ("attention", "o"): "self_attn.o_proj",
    ("attention", "q_norm"): "self_attn.q_norm",
    ("attention", "k_norm"): "self_attn.k_norm",
    ("ffn_norm",): "post_attention_layernorm",
}


def hf_tensors(params: llama.Params, model: ModelConfig) -> dict[str, np.ndarray]:
    """Names the parameters of a model, NumPy arrays, as transformers does, those of a layer side by side.

    The tensors are views, but for some of a mixture: writing to them fills `params`. transformers has a tensor for each
    layer and each expert, and a gated neuron's two rows of ours in two; its down_proj is [D, F], the transpose of ours.
    """
    flat = flatten_dict(params)
    tensors = {"model.embed_tokens.weight": flat["embed", "embedding"]}
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        for path, name in _LAYER.items():
            if ("layers", *path) not in flat:
                continue
            array = flat["layers", *path][layer]
            turns = path in (("attention", "q"), ("attention", "k")) and not rotates_halves(model)
            tensors[f"{prefix}.{name}.weight"] = _neighbours(array, model.head_width) if turns else array
        ffn = {name: array[layer] for name, array in params["layers"]["ffn"].items()}
        named = _mixture(ffn, model) if model.experts else _ffn(ffn["up"], ffn["down"], model)
        tensors |= {f"{prefix}.mlp.{name}": array for name, array in named.items()}
    tensors["model.norm.weight"] = flat["norm",]
    if not model.tie_embeddings:
        tensors["lm_head.weight"] = flat["unembed",]
    return tensors


def _neighbours(rows: np.ndarray, head_width: int) -> np.ndarray:
    """Puts the two halves of each head's rows side by side, row i beside row i + H / 2."""
    return rows.reshape(-1, 2, head_width // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _ffn(up: np.ndarray, down: np.ndarray, model: ModelConfig) -> dict[str, np.ndarray]:
    rows = {"gate_proj": up[::2], "up_proj": up[1::2]} if model.activation in GATES else {"up_proj": up}
    return {f"{name}.weight": array for name, array in (rows | {"down_proj": down.T}).items()}


def _mixture(ffn: dict[str, np.ndarray], model: ModelConfig) -> dict[str, np.ndarray]:
    """Names a mixture's parameters. A Glm4Moe without a shared expert has one of no neurons."""
    sigmoid, bias = model.router_scores == "sigmoid", ffn[mixture.BIAS]
    named = {"gate.e_score_correction_bias": bias} if sigmoid else {"moe_statics.e_score_correction_bias": bias[None]}
    tensors = {"gate.weight": ffn[mixture.ROUTER] / np.sqrt(np.float32(model.dim))} | named  # logits are over sqrt(D)
    none = np.empty((0, model.dim), np.float32)
    shared = ffn.get("shared_up", none), ffn.get("shared_down", none)
    ffns = {"shared_experts": shared} if sigmoid or model.shared_expert_dim else {}
    parts = (np.split(ffn[name], model.experts) for name in ("up", "down"))
    ffns |= {f"experts.{expert}": weights for expert, weights in enumerate(zip(*parts, strict=True))}
    for name, weights in ffns.items():
        tensors |= {f"{name}.{key}": array for key, array in _ffn(*weights, model).items()}
    return tensors


def empty_params(model: ModelConfig) -> llama.Params:
    """Makes float32 arrays for the parameters of a model, to be filled."""
    shapes = jax.eval_shape(functools.partial(llama.init, model), jax.random.key(0))[1]
    return jax.tree.map(lambda p: np.empty(p.shape, np.float32), shapes)
