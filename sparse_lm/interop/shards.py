"""Safetensors files of a model, written and read a tensor or a shard at a time.

One file is `model.safetensors`. Several are `model-00001-of-00003.safetensors` and so on, with
`model.safetensors.index.json` telling which tensor is in which.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class TensorSize(NamedTuple):
    """A tensor that is going to be written."""

    name: str
    nbytes: int


def write_shards(
    directory: Path, sizes: Iterable[TensorSize], tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int
) -> None:
    """Writes tensors as they come, in files of at most `shard_bytes` unless a single tensor is larger.

    At most one file's tensors are in memory at a time.

    Args:
      directory: an existing one.
      sizes: of all tensors, in the order in which they come.
      tensors: (name, array).
      shard_bytes: the most bytes of tensors in a file.
    """
    plan = list(_plan(sizes, shard_bytes))
    names = [SINGLE] if len(plan) == 1 else [f"model-{i:05}-of-{len(plan):05}.safetensors" for i in _count(plan)]
    tensors = iter(tensors)
    for file, shard in zip(names, plan, strict=True):
        _write(directory / file, shard, tensors)
    if len(plan) > 1:
        index = {
            "metadata": {"total_size": sum(size.nbytes for shard in plan for size in shard)},
            "weight_map": {size.name: file for file, shard in zip(names, plan, strict=True) for size in shard},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class ShardedTensors:
    """The tensors of a directory, by name; only headers are read until one is asked for.

    Raises:
      ValueError: files are missing or damaged. The message names them.
    """

    def __init__(self, directory: Path):
        self._files = {}
        for file in _files(directory):
            opened = _open(file)
            self._files |= {name: opened for name in opened.keys()}  # noqa: SIM118 (not a dict)

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Names it as safetensors do, such as "F32" or "BF16"."""
        return self._files[name].get_slice(name).get_dtype()

    def read(self, name: str) -> np.ndarray:
        return self._files[name].get_tensor(name)


def _plan(sizes: Iterable[TensorSize], shard_bytes: int) -> Iterator[list[TensorSize]]:
    shard: list[TensorSize] = []
    for size in sizes:
        if shard and sum(other.nbytes for other in shard) + size.nbytes > shard_bytes:
            yield shard
            shard = []
        shard.append(size)
    yield shard


def _count(plan: list) -> range:
    return range(1, len(plan) + 1)


def _write(path: Path, shard: list[TensorSize], tensors: Iterator[tuple[str, np.ndarray]]) -> None:
    held = {}
    for size in shard:
        name, array = next(tensors)
        if (name, array.nbytes) != size:
            raise ValueError(f"expected {size.name} of {size.nbytes} bytes, got {name} of {array.nbytes}")
        held[name] = np.ascontiguousarray(array)  # the library writes the buffer as it lies in memory
    save_file(held, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library's files can be read by their owner alone


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.is_file():
        if not (directory / SINGLE).is_file():
            raise ValueError(f"has neither {SINGLE} nor {INDEX}; other formats of weights are not read")
        return [directory / SINGLE]
    files = [directory / name for name in sorted(set(_weight_map(index).values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}, which {INDEX} names")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """Reads the file of each tensor from the index."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{index.name} is not JSON: {error}") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index.name} must have a weight_map that gives the file of each tensor")
    return names


def _open(file: Path) -> Any:
    try:
        return safe_open(file, "np")
    except SafetensorError as error:
        raise ValueError(f"{file.name} is damaged: {error}") from error
