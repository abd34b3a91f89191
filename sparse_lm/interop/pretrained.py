"""Starting a run from a model that transformers saved: `config.init_from`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from sparse_lm.config import Config, ConfigError, with_tokenizer
from sparse_lm.data import DataError
from sparse_lm.data.tokenizer import load_tokenizer
from sparse_lm.interop.hf_config import from_hf_config
from sparse_lm.interop.hf_weights import weights
from sparse_lm.interop.shards import ShardedTensors
from sparse_lm.model.llama import Params

DTYPES = ("F32", "BF16", "F16")
EMBED, UNEMBED = "model.embed_tokens.weight", "lm_head.weight"


class Pretrained:
    """The model in `config.init_from`, checked against the run; its weights are not read yet, but for
    tied embeddings that it has twice.

    Raises:
      ConfigError: the directory is not a model of this family, lacks tensors or has others, or
        `config.model` describes another model.
    """

    def __init__(self, config: Config):
        self._config, self._directory = config, Path(config.init_from)
        hf_config = self._read_json("config.json")
        try:
            self._tensors = ShardedTensors(self._directory)
            gated = any(name.endswith("gate_proj.weight") for name in self._tensors.names)
            fixed = from_hf_config(hf_config, gated=gated)
        except ValueError as error:
            raise self._refusal(str(error)) from error
        self._check_model(fixed)
        self._check_tensors()

    def config_with_tokenizer(self) -> Config:
        """Returns the run's configuration, with the model's tokenizer if it names none: embeddings are of its tokens.

        Raises:
          ConfigError: it names none and the model comes without, or it names one with other tokens.
        """
        own, named = self._directory / "tokenizer.json", self._config.data.tokenizer
        if not own.is_file():
            if not named:
                raise ConfigError("data.tokenizer", named, f"must name the tokenizer of {own.parent}, which has none")
            return self._config
        if named:
            self._check_same_tokens(named, own)
            return self._config
        return with_tokenizer(self._config, str(own))

    def params(self) -> Params:
        """Reads the stored values, exactly, as float32 arrays."""
        params: dict[tuple[str, ...], np.ndarray] = {}
        for weight in weights(self._config.model):
            array = self._tensors.read(weight.name).astype(np.float32, copy=False)
            array = array.T if weight.transposed else array
            if weight.layer is None:
                params[weight.path] = array
            else:
                halves = 1 if weight.rows == slice(None) else weight.rows.step
                stacked = (self._config.model.layers, halves * array.shape[0], *array.shape[1:])
                params.setdefault(weight.path, np.empty(stacked, np.float32))[weight.layer][weight.rows] = array
        return unflatten_dict(params)

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError("init_from", self._config.init_from, reason)

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self._directory / name).read_text(encoding="utf-8"))
        except OSError as error:
            reason = f"must be a directory with {name}: {error.strerror}"
            raise self._refusal(reason) from error
        except ValueError as error:
            raise self._refusal(f"its {name} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise self._refusal(f"its {name} must be a group of keys, not {type(content).__name__}")
        return content

    def _check_model(self, fixed: dict[str, Any]) -> None:
        here = {key: getattr(self._config.model, key) for key in fixed}
        different = {key: value for key, value in fixed.items() if value != here[key]}
        if different:
            key = next(iter(different))
            needed = " ".join(f"--config.model.{key}={value}" for key, value in different.items())
            raise ConfigError(f"model.{key}", here[key], f"the model in {self._directory} needs {needed}")

    def _check_tensors(self) -> None:
        wanted = {weight.name: weight.shape for weight in weights(self._config.model)}
        # Llama 1 and 2 were published with RoPE's frequencies, which the configuration decides.
        there = {name for name in self._tensors.names if not name.endswith("rotary_emb.inv_freq")}
        if self._config.model.tie_embeddings:
            there.discard(UNEMBED)
        for what, names in (("lacks", wanted.keys() - there), ("has unexpected", there - wanted.keys())):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise self._refusal(f"{what} {min(names)}{more}")
        for name, shape in wanted.items():
            if self._tensors.shape(name) != shape:
                raise self._refusal(f"its {name} is {list(self._tensors.shape(name))}; must be {list(shape)}")
            if self._tensors.dtype(name) not in DTYPES:
                raise self._refusal(f"its {name} is {self._tensors.dtype(name)}; must be one of {', '.join(DTYPES)}")
        if self._config.model.tie_embeddings and UNEMBED in self._tensors.names:
            self._check_tied()

    def _check_tied(self) -> None:
        """Refuses embeddings that are there twice and differ: transformers does not tie them."""
        one, other = self._tensors.dtype(EMBED), self._tensors.dtype(UNEMBED)
        if one != other or not np.array_equal(self._tensors.read(EMBED), self._tensors.read(UNEMBED)):
            raise self._refusal(f"its {UNEMBED} is not {EMBED}, but its config.json has tie_word_embeddings")

    def _check_same_tokens(self, named: str, own: Path) -> None:
        try:
            one, other = (load_tokenizer(path).get_vocab(with_added_tokens=True) for path in (named, own))
        except DataError as error:
            raise ConfigError("data.tokenizer", named, str(error)) from error
        if one != other:
            raise ConfigError("data.tokenizer", named, f"must be empty or have the tokens of {own}")
