"""Starting a run from a model that transformers saved: `config.init_from`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from sparse_lm.config import Config, with_tokenizer
from sparse_lm.data.tokenizer import end_of_text, fingerprint, load_tokenizer, vocabulary_size
from sparse_lm.errors import ConfigError, DataError
from sparse_lm.interop.hf_config import from_hf_config
from sparse_lm.interop.hf_weights import empty_params, hf_tensors
from sparse_lm.interop.shards import open_tensors
from sparse_lm.model.llama import Params

_log = logging.getLogger(__name__)
DTYPES = ("F32", "BF16", "F16")
_EMBED, _UNEMBED = "model.embed_tokens.weight", "lm_head.weight"


class Pretrained:
    """The model in `config.init_from`, checked against the run; its weights are not read yet.

    Raises:
      ConfigError: the directory is not a model of this family, lacks tensors or has others, or
        `config.model` describes another model.
    """

    def __init__(self, config: Config):
        self._config, self._directory = config, Path(config.init_from)
        try:
            hf_config = json.loads((self._directory / "config.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise self._refusal(f"must be a directory with config.json: {error.strerror}") from error
        except ValueError as error:
            raise self._refusal(f"its config.json is not JSON: {error}") from error
        if not isinstance(hf_config, dict):
            raise self._refusal("its config.json is no group of keys")
        self._ends_of_text = hf_config.get("eos_token_id")
        try:
            self._stored = open_tensors(self._directory)
            gated = any(name.endswith("gate_proj.weight") for name in self._stored)
            fixed = from_hf_config(hf_config, gated=gated)
        except ValueError as error:
            raise self._refusal(str(error)) from error
        self._check_model(fixed)
        self._check_tensors()

    def config_with_tokenizer(self) -> Config:
        """Returns the run's configuration, with the model's tokenizer if it names none: embeddings are of its tokens.

        Raises:
          ConfigError: it names none and the model comes without, or it names another; or the model has fewer
            embeddings than its tokenizer has entries.
        """
        own, named = self._directory / "tokenizer.json", self._config.data.tokenizer
        if not own.is_file():
            if not named:
                raise ConfigError("data.tokenizer", named, f"must name the tokenizer of {own.parent}, which has none")
            return self._config
        try:
            tokenizer = load_tokenizer(own)
        except DataError as error:
            raise self._refusal(str(error)) from error
        if (entries := vocabulary_size(tokenizer)) > self._config.model.vocab_size:
            raise self._refusal(f"its tokenizer.json has {entries} entries: its vocab_size must be at least that")
        ends, end = self._ends_of_text, end_of_text(tokenizer)
        if ends is not None and end not in (ends if isinstance(ends, list) else [ends]):
            _log.warning("%s ends texts by token %s: here, and in an export, token %d does", own.parent, ends, end)
        if not named:
            return with_tokenizer(self._config, str(own))
        try:
            same = fingerprint(load_tokenizer(named)) == fingerprint(tokenizer)
        except DataError as error:
            raise ConfigError("data.tokenizer", named, str(error)) from error
        if not same:
            raise ConfigError("data.tokenizer", named, f"must be empty or tokenise as {own}")
        return self._config

    def params(self) -> Params:
        """Reads the stored values, exactly, as float32 arrays."""
        params = empty_params(self._config.model)
        for name, tensor in hf_tensors(params, self._config.model).items():
            tensor[...] = self._stored[name][:]
        return params

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError("init_from", self._config.init_from, reason)

    def _check_model(self, fixed: dict[str, Any]) -> None:
        model = self._config.model
        here = {key: getattr(model, key) for key in fixed}
        if model.head_width * model.heads == model.dim:
            here["head_dim"] = 0  # dim / heads, spelled out or not
        different = {key: value for key, value in fixed.items() if value != here[key]}
        if different:
            key = next(iter(different))
            needed = " ".join(f"--config.model.{key}={value}" for key, value in different.items())
            raise ConfigError(f"model.{key}", getattr(model, key), f"the model in {self._directory} needs {needed}")

    def _check_tensors(self) -> None:
        # Llama 1 and 2 were published with RoPE's frequencies, which the configuration decides.
        there = {name for name in self._stored if not name.endswith("rotary_emb.inv_freq")}
        twice = self._config.model.tie_embeddings and _UNEMBED in there  # as some are published
        if twice:
            there.remove(_UNEMBED)
        tensors = hf_tensors(empty_params(self._config.model), self._config.model)
        for what, names in (("lacks", tensors.keys() - there), ("has unexpected", there - tensors.keys())):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise self._refusal(f"{what} {min(names)}{more}")
        for name, tensor in tensors.items():
            shape, dtype = self._stored[name].get_shape(), self._stored[name].get_dtype()
            if shape != list(tensor.shape):
                raise self._refusal(f"its {name} is {shape}; must be {list(tensor.shape)}")
            if dtype not in DTYPES:
                raise self._refusal(f"its {name} is {dtype}; must be one of {', '.join(DTYPES)}")
        # Two that differ nobody would tie.
        if twice and not np.array_equal(*(self._stored[name][:] for name in (_EMBED, _UNEMBED))):
            raise self._refusal(f"its {_UNEMBED} is not {_EMBED}, but its config.json has tie_word_embeddings")
