"""Chooses which implementation of an op runs.

A caller who names a backend gets that one or its refusal; a caller who names none gets the best one that does not
refuse, and the log says once why a better one was passed over. docs/adding_a_backend.md says what a backend provides.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

NAMES = ("reference", "hopper", "triton")
_BEFORE_REFERENCE = ("hopper", "triton")  # best first; the reference refuses nothing

_log = logging.getLogger(__name__)
_recorders: list[dict[str, set[str]]] = []


def dispatch(op: str, implementation: str | None, *args: Any, **kwargs: Any) -> Any:
    """Runs `op`.

    Raises:
      ValueError: no backend of that name.
      NotImplementedError: the named backend lacks the op, or cannot run it on this machine or on these arguments.
    """
    if implementation is not None:
        try:
            if reason := unavailable(implementation):
                raise NotImplementedError(reason)
            return _run(op, implementation, args, kwargs)
        except NotImplementedError as refusal:
            raise NotImplementedError(f"implementation {implementation!r} of {op}: {refusal}") from refusal
    for name in _BEFORE_REFERENCE:
        if reason := unavailable(name):
            _log_once(f"operations pass over {name!r}: {reason}")
            continue
        try:
            return _run(op, name, args, kwargs)
        except NotImplementedError as refusal:
            _log_once(f"{op} passes over {name!r}: {refusal}")
    return _run(op, "reference", args, kwargs)


@contextlib.contextmanager
def record() -> Iterator[dict[str, set[str]]]:
    """Collects {op: names of the backends that ran it} from what is traced inside the context."""
    used: dict[str, set[str]] = {}
    _recorders.append(used)
    try:
        yield used
    finally:
        _recorders.pop()


def unavailable(name: str) -> str | None:
    """Says why this machine cannot run a backend, None if it can; raises ValueError if there is none of that name."""
    if name not in NAMES:
        raise ValueError(f"implementation = {name!r} must be one of {', '.join(NAMES)}")
    return _module(name).unavailable(jax.devices()[0])


def describe(name: str) -> str:
    """Returns the name of a backend, and in brackets what is not known of it on this machine."""
    caveat = getattr(_module(name), "caveat", lambda device: None)(jax.devices()[0])
    return f"{name} ({caveat})" if caveat else name


def functions(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Makes the `__getattr__` (PEP 562) of a backend's package, which imports kernels when they are asked for.

    `modules` has the names of the functions of each module of the package, by the module's name.
    """

    def get(name: str) -> Any:
        for module, names in modules.items():
            if name in names:
                return getattr(importlib.import_module(f"{package}.{module}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


def import_error(package: str, modules: Iterable[str]) -> str | None:
    """Says why some of these modules of a package cannot be imported, or returns None if all can."""
    try:
        for module in modules:
            importlib.import_module(f"{package}.{module}")
    except ImportError as error:
        return f"cannot be imported: {error}"
    return None


def _run(op: str, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    function = getattr(_module(name), op, None)
    if function is None:
        raise NotImplementedError(f"that backend has no {op}")
    result = function(*args, **kwargs)
    for used in _recorders:
        used.setdefault(op, set()).add(name)
    return result


def _module(name: str) -> types.ModuleType:
    return importlib.import_module(f"sparse_lm.ops.{name}")


@functools.cache
def _log_once(message: str) -> None:
    _log.info(message)
