"""Safetensors files of a model, written and read a file or a tensor at a time.

One file is `model.safetensors`. Several are `model-00001-of-00003.safetensors` and so on, with
`model.safetensors.index.json` telling which tensor is in which.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sparse_lm.files import write_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_shards(directory: Path, tensors: Mapping[str, np.ndarray], shard_bytes: int) -> None:
    """Writes tensors, in files of at most `shard_bytes` unless a single tensor is larger.

    Tensors that are views, as of a transpose, are copied a file at a time.
    """
    split = split_state_dict_into_shards_factory(
        tensors,
        max_shard_size=shard_bytes,
        get_storage_size=lambda array: array.nbytes,
        filename_pattern="model{suffix}.safetensors",
    )
    for file, names in split.filename_to_tensors.items():
        # The library writes the buffer as it lies in memory, and files that only their owner may read.
        contiguous = {name: np.ascontiguousarray(tensors[name]) for name in names}
        save_file(contiguous, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)
    if split.is_sharded:
        write_json(directory / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def _files(directory: Path) -> list[Path]:
    """Returns the files of a model, those that transformers reads: there may be others, such as averaged weights."""
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file() or not index.is_file():
        return [single]
    try:
        return [directory / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{INDEX} must have a weight_map that gives the file of each tensor") from error


def open_tensors(directory: Path) -> dict[str, Any]:
    """Opens the tensors of a directory, by name, as slices of safetensors: `[:]` reads one, and nothing else does.

    Raises:
      ValueError: there are no files, or one cannot be read. The message names it.
    """
    tensors = {}
    for file in _files(directory):
        try:
            opened = safe_open(file, "np")
        except FileNotFoundError as error:
            raise ValueError(f"lacks {file.name}; weights are read from safetensors alone") from error
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file.name} cannot be read: {error}") from error
        tensors |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    return tensors
