"""Tuned configurations of the kernels, by device and shape; other shapes have their kernel's heuristic.

`tuned.json` maps device kind -> kernel -> shape -> fields of the kernel's Config, as
experiments/tune_kernels.py writes them. Shapes are "MxNxK"; for Venom "MxNxKxvxm"; for a product of
listed rows "TxKcxDxv".
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import TypeVar

import jax

PATH = pathlib.Path(__file__).with_name("tuned.json")

C = TypeVar("C")


def lookup(kernel: str, shape: tuple[int, ...], config: type[C]) -> C | None:
    """The tuned configuration, or None."""
    entries = _tuned().get(jax.devices()[0].device_kind, {}).get(kernel, {})
    fields = entries.get("x".join(map(str, shape)))
    return config(**fields) if fields else None


@functools.cache
def _tuned() -> dict:
    return json.loads(PATH.read_text())
