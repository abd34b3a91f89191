"""Maps our parameters to transformers' tensors."""

from __future__ import annotations

import functools

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from sparse_lm.config import ModelConfig
from sparse_lm.model import llama
from sparse_lm.recipes.activations import GATES

_LAYER = {
    ("attention_norm",): "input_layernorm",
    ("attention", "q"): "self_attn.q_proj",
    ("attention", "k"): "self_attn.k_proj",
    ("attention", "v"): "self_attn.v_proj",
    ("attention", "o"): "self_attn.o_proj",
    ("attention", "q_norm"): "self_attn.q_norm",
    ("attention", "k_norm"): "self_attn.k_norm",
    ("ffn_norm",): "post_attention_layernorm",
    ("ffn", "up"): "mlp.up_proj",
    ("ffn", "down"): "mlp.down_proj",
}


def hf_tensors(params: llama.Params, model: ModelConfig) -> dict[str, np.ndarray]:
    """Names the parameters of a model, NumPy arrays, as transformers does, those of a layer side by side.

    The tensors are views: writing to them fills `params`. transformers has a tensor for each layer, and a gated
    neuron's two rows of ours in two; its down_proj is [D, F], the transpose of ours.
    """
    flat = flatten_dict(params)
    tensors = {"model.embed_tokens.weight": flat["embed", "embedding"]}
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        for path, name in _LAYER.items():
            if ("layers", *path) not in flat:
                continue
            array = flat["layers", *path][layer]
            if path == ("ffn", "up") and model.activation in GATES:
                tensors[f"{prefix}.mlp.gate_proj.weight"], array = array[::2], array[1::2]
            tensors[f"{prefix}.{name}.weight"] = array.T if path == ("ffn", "down") else array
    tensors["model.norm.weight"] = flat["norm",]
    if not model.tie_embeddings:
        tensors["lm_head.weight"] = flat["unembed",]
    return tensors


def empty_params(model: ModelConfig) -> llama.Params:
    """Makes float32 arrays for the parameters of a model, to be filled."""
    shapes = jax.eval_shape(functools.partial(llama.init, model), jax.random.key(0))[1]
    return jax.tree.map(lambda p: np.empty(p.shape, np.float32), shapes)
