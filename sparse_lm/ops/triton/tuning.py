"""Tuned configurations of the products, by device and shape; other shapes have the heuristic.

`tuned.json` maps device kind -> kernel -> shape -> fields of the kernel's Config, as experiments/bench_triton.py
writes them with --tune. Shapes are "MxNxK"; for Venom "MxNxKxvxm".
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
