"""Describes a checkpoint: its step, the run that it is of, its metrics, and every array with its checksum.

    {"format": 2, "step": 300, "run": {key: value}, "metrics": {name: number}, "digest": SHA-256 of all the rest,
     "arrays": {"params/embed/embedding": {"shape": [...], "dtype": "float32", "checksums": [...]}, ...}}

A parameter of all layers, and a sparse variable, has a checksum for each layer, which can then be read and
checked alone; any other array has one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from sparse_lm.training.checkpoints.checksums import checksum, checksums

FORMAT = 2

ArrayPath = tuple[str, ...]
"""The path of an array in a checkpoint: (item, name, name, ...)."""


class ManifestError(ValueError):
    """A manifest that is not what was written, or an array that is not what its manifest says."""


class OldFormatError(ValueError):
    """A manifest of another version of this library."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array: shape, dtype by its NumPy name, and 16 hexadecimal digits for each layer, or once."""

    shape: tuple[int, ...]
    dtype: str
    checksums: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """See the module's docstring."""

    step: int
    run: Mapping[str, Any]
    metrics: Mapping[str, float]
    arrays: Mapping[ArrayPath, Entry]

    def to_json(self) -> dict[str, Any]:
        content = {
            "format": FORMAT,
            "step": self.step,
            "run": dict(self.run),
            "metrics": dict(self.metrics),
            "arrays": {"/".join(path): dataclasses.asdict(entry) for path, entry in self.arrays.items()},
        }
        content = json.loads(json.dumps(content))  # as it will be read, so that the digest is of that
        return {**content, "digest": _digest(content)}

    @classmethod
    def from_json(cls, content: Any) -> Manifest:
        """Inverts `to_json`.

        Raises:
          ManifestError: not a byte may have changed.
          OldFormatError: another version of this library wrote it.
        """
        if not isinstance(content, dict) or content.get("digest") != _digest(content):
            raise ManifestError("its manifest is damaged")
        if content["format"] != FORMAT:
            raise OldFormatError(f"has format {content['format']}, not {FORMAT}")
        arrays = {
            tuple(name.split("/")): Entry(tuple(entry["shape"]), entry["dtype"], tuple(entry["checksums"]))
            for name, entry in content["arrays"].items()
        }
        return cls(content["step"], content["run"], content["metrics"], arrays)

    def check(self, arrays: Mapping[ArrayPath, Any]) -> None:
        """Compares arrays, on whatever devices, with their checksums.

        Raises:
          ManifestError: naming an array that differs.
        """
        for path, found in _entries(arrays).items():
            _compare(path, self.arrays[path], found)

    def check_layer(self, path: ArrayPath, layer: int, array: Any) -> None:
        """Does what `check` does, for one layer of an array that has a checksum for each."""
        saved = self.arrays[path]
        found = Entry(array.shape, array.dtype.name, tuple(_hexadecimal(jax.device_get(checksum(array)))))
        one_layer = Entry(saved.shape[1:], saved.dtype, saved.checksums[layer : layer + 1])
        _compare(path, one_layer, found, first_layer=layer)


def describe(
    step: int, arrays: Mapping[ArrayPath, Any], run: Mapping[str, Any], metrics: Mapping[str, float]
) -> Manifest:
    """Makes the manifest of arrays that are about to be saved. Waits for them to be computed."""
    return Manifest(step, run, metrics, _entries(arrays))


def by_layer(path: ArrayPath) -> bool:
    """Returns True if an array's leading axis is that of layers, which are checked one by one."""
    return path[:2] == ("params", "layers") or path[0] == "recipe_state"


def _entries(arrays: Mapping[ArrayPath, Any]) -> dict[ArrayPath, Entry]:
    words = jax.device_get(checksums(list(arrays.values()), axes_kept=tuple(int(by_layer(path)) for path in arrays)))
    return {
        path: Entry(tuple(array.shape), array.dtype.name, tuple(_hexadecimal(pairs)))
        for (path, array), pairs in zip(arrays.items(), words, strict=True)
    }


def _hexadecimal(pairs: np.ndarray) -> list[str]:
    return [f"{high:08x}{low:08x}" for high, low in pairs.reshape(-1, 2)]


def _compare(path: ArrayPath, saved: Entry, found: Entry, first_layer: int = 0) -> None:
    name = "/".join(path)
    if (found.shape, found.dtype) != (saved.shape, saved.dtype):
        raise ManifestError(f"{name} is {found} and was saved as {saved}")
    for index, (wanted, actual) in enumerate(zip(saved.checksums, found.checksums, strict=True), first_layer):
        if wanted != actual:
            layer = f", layer {index}," if by_layer(path) else ""
            raise ManifestError(f"{name}{layer} has checksum {actual} and was saved with {wanted}")


def _digest(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
