"""Tuned configurations of a backend's kernels, by device and shape; other shapes have their kernel's heuristic.

A backend's `tuned.json` maps device kind -> kernel -> shape -> fields of the kernel's Config. Shapes are "MxNxK"; for
Venom "MxNxKxvxm"; for a product of listed rows "TxKcxDxv".
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import TypeVar

import jax

HOPPER, TRITON = (pathlib.Path(__file__).parent / backend / "frame/tuned.json" for backend in ("hopper", "triton"))

C = TypeVar("C")


def lookup(path: pathlib.Path, kernel: str, shape: tuple[int, ...], config: type[C]) -> C | None:
    """Finds the configuration that the file at `path` has for this process' device, or None."""
    entries = _entries(path).get(jax.devices()[0].device_kind, {}).get(kernel, {})
    fields = entries.get("x".join(map(str, shape)))
    return config(**fields) if fields else None


@functools.cache
def _entries(path: pathlib.Path) -> dict:
    return json.loads(path.read_text())
