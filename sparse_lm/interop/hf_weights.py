"""Maps transformers' tensors to our parameters."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
from flax.traverse_util import flatten_dict

from sparse_lm.config import ModelConfig
from sparse_lm.model import llama

_OUTER = {
    ("embed", "embedding"): "model.embed_tokens",
    ("norm",): "model.norm",
    ("unembed",): "lm_head",
}
_LAYER = {
    ("attention_norm",): "input_layernorm",
    ("attention", "q"): "self_attn.q_proj",
    ("attention", "k"): "self_attn.k_proj",
    ("attention", "v"): "self_attn.v_proj",
    ("attention", "o"): "self_attn.o_proj",
    ("ffn_norm",): "post_attention_layernorm",
    ("ffn", "gate"): "mlp.gate_proj",
    ("ffn", "up"): "mlp.up_proj",
    ("ffn", "down"): "mlp.down_proj",
}
_TRANSPOSED = ("ffn", "down")  # ours is neuron-major, [F, D]; torch.nn.Linear's is [outputs, inputs] = [D, F]


class Weight(NamedTuple):
    """One tensor of an exported model.

    Attributes:
      name: in the safetensors files.
      path: of our parameter, which has a leading axis of layers if `layer` is not None.
      layer: index on that axis.
      transposed: ours is its transpose.
      shape: in the safetensors files.
    """

    name: str
    path: tuple[str, ...]
    layer: int | None
    transposed: bool
    shape: tuple[int, ...]


def weights(model: ModelConfig) -> list[Weight]:
    """Lists all tensors of a model, every parameter once, those of a layer side by side."""
    params = flatten_dict(jax.eval_shape(functools.partial(llama.init, model), jax.random.key(0))[1])
    outer = {
        path: Weight(f"{name}.weight", path, None, False, params[path].shape)
        for path, name in _OUTER.items()
        if path in params
    }
    layers = [
        _layer_weight(layer, path, name, params["layers", *path].shape[1:])
        for layer in range(model.layers)
        for path, name in _LAYER.items()
        if ("layers", *path) in params
    ]
    embedding = outer.pop(("embed", "embedding"))
    return [embedding, *layers, *outer.values()]


def _layer_weight(layer: int, path: tuple[str, ...], name: str, shape: tuple[int, ...]) -> Weight:
    transposed = path == _TRANSPOSED
    return Weight(
        f"model.layers.{layer}.{name}.weight",
        ("layers", *path),
        layer,
        transposed,
        shape[::-1] if transposed else shape,
    )
