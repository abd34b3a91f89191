"""Kernels that are imported when they are asked for: what they need lacks where they do not run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def functions(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Makes a package's `__getattr__` (PEP 562).

    Args:
      package: its full name.
      modules: by function's name, the module of the package that has it.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return get


def import_error(package: str, modules: Mapping[str, str]) -> str | None:
    """Says why some of these modules cannot be imported, or returns None if all can; arguments as in `functions`."""
    try:
        for module in modules.values():
            importlib.import_module(f"{package}.{module}")
    except ImportError as error:
        return f"cannot be imported: {error}"
    return None
