"""A model as a directory that transformers loads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from sparse_lm.config import ModelConfig
from sparse_lm.data.tokenizer import end_of_text
from sparse_lm.files import write_json
from sparse_lm.interop import bitmask_24
from sparse_lm.interop.hf_config import to_hf_config, tokenizer_config
from sparse_lm.interop.hf_weights import Weight, weights
from sparse_lm.interop.shards import TensorSize, write_shards

ITEMSIZE = np.dtype(np.float32).itemsize


@dataclasses.dataclass(frozen=True)
class HfModel:
    """Holds what goes into the directory.

    Attributes:
      model: the architecture.
      seq_len: tokens of a training sequence.
      read: (path of a parameter, layer or None) -> float32 array, as `LayerwiseParams.read`.
      tokenizer: path of a tokenizer.json.
      card: the model card, Markdown.
      layers_24: linear layers, such as "up_proj", to write in the layout of `bitmask_24`.
      dense_layers: how many of the model's layers, the first ones, have none of these.
    """

    model: ModelConfig
    seq_len: int
    read: Callable[[tuple[str, ...], int | None], np.ndarray]
    tokenizer: Path
    card: str
    layers_24: Sequence[str] = ()
    dense_layers: int = 0

    def write(self, directory: Path, shard_bytes: int) -> None:
        """Writes safetensors, tokenizer files, model card and, last, config.json: a directory with one is whole.

        Args:
          directory: an existing, empty one.
          shard_bytes: the most bytes of weights in a file, unless one tensor is larger. Memory holds
            one file's and one layer's FFN.
        """
        write_shards(directory, self._sizes(), self._tensors(), shard_bytes)
        tokenizer = Tokenizer.from_file(str(self.tokenizer))
        end = end_of_text(tokenizer)
        hf_config = to_hf_config(self.model, seq_len=self.seq_len, end_of_text=end)
        if self.layers_24:
            names = [_module(weight) for weight in weights(self.model) if self._is_24(weight)]
            hf_config["quantization_config"] = bitmask_24.quantization_config(names)
        if tokenizer.num_special_tokens_to_add(is_pair=False):
            tokenizer.post_processor = None  # training added no token to a text either
        tokenizer.save(str(directory / "tokenizer.json"))
        write_json(
            directory / "tokenizer_config.json",
            tokenizer_config(seq_len=self.seq_len, end_of_text=tokenizer.id_to_token(end)),
        )
        write_json(directory / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
        (directory / "README.md").write_text(self.card, encoding="utf-8")
        write_json(directory / "config.json", hf_config)

    def _sizes(self) -> Iterator[TensorSize]:
        for weight in weights(self.model):
            if self._is_24(weight):
                yield from bitmask_24.compressed_sizes(_module(weight), weight.shape, ITEMSIZE)
            else:
                yield TensorSize(weight.name, math.prod(weight.shape) * ITEMSIZE)

    def _tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        for weight in weights(self.model):
            array = self.read(weight.path, weight.layer)[weight.rows]
            array = array.T if weight.transposed else array
            if self._is_24(weight):
                yield from bitmask_24.compress(_module(weight), array).items()
            else:
                yield weight.name, array

    def _is_24(self, weight: Weight) -> bool:
        return _module(weight).rpartition(".")[2] in self.layers_24 and weight.layer >= self.dense_layers


def _module(weight: Weight) -> str:
    return weight.name.removesuffix(".weight")
