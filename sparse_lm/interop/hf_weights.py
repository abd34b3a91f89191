"""Maps transformers' tensors to our parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
from flax.traverse_util import flatten_dict

from sparse_lm.config import ModelConfig
from sparse_lm.model import llama
from sparse_lm.recipes.activations import GATES

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
    ("attention", "q_norm"): "self_attn.q_norm",
    ("attention", "k_norm"): "self_attn.k_norm",
    ("ffn_norm",): "post_attention_layernorm",
    ("ffn", "up"): "mlp.up_proj",
    ("ffn", "down"): "mlp.down_proj",
}
_UP, _GATE_NAME = ("ffn", "up"), "mlp.gate_proj"
_TRANSPOSED = ("ffn", "down")  # ours is neuron-major, [F, D]; torch.nn.Linear's is [outputs, inputs] = [D, F]


class Weight(NamedTuple):
    """One tensor of an exported model.

    Attributes:
      name: in the safetensors files.
      path: of our parameter, which has a leading axis of layers if `layer` is not None.
      layer: index on that axis.
      transposed: ours is its transpose.
      shape: in the safetensors files.
      rows: of our parameter; both of a gated neuron's stand in one.
    """

    name: str
    path: tuple[str, ...]
    layer: int | None
    transposed: bool
    shape: tuple[int, ...]
    rows: slice = slice(None)


def weights(model: ModelConfig) -> list[Weight]:
    """Lists all tensors of a model, every parameter once, those of a layer side by side."""
    params = flatten_dict(jax.eval_shape(functools.partial(llama.init, model), jax.random.key(0))[1])
    outer = {
        path: Weight(f"{name}.weight", path, None, False, params[path].shape)
        for path, name in _OUTER.items()
        if path in params
    }
    layers = [
        weight
        for layer in range(model.layers)
        for path, name in _LAYER.items()
        if ("layers", *path) in params
        for weight in _layer_weights(layer, path, name, params["layers", *path].shape[1:], model)
    ]
    embedding = outer.pop(("embed", "embedding"))
    return [embedding, *layers, *outer.values()]


def _layer_weights(
    layer: int, path: tuple[str, ...], name: str, shape: tuple[int, ...], model: ModelConfig
) -> Iterator[Weight]:
    if path == _UP and model.activation in GATES:
        half = (shape[0] // 2, shape[1])
        for first, half_name in enumerate((_GATE_NAME, name)):
            yield _layer_weight(layer, path, half_name, half, slice(first, None, 2))
    else:
        yield _layer_weight(layer, path, name, shape)


def _layer_weight(
    layer: int, path: tuple[str, ...], name: str, shape: tuple[int, ...], rows: slice = slice(None)
) -> Weight:
    transposed = path == _TRANSPOSED
    full_name, shape = f"model.layers.{layer}.{name}.weight", shape[::-1] if transposed else shape
    return Weight(full_name, ("layers", *path), layer, transposed, shape, rows)
