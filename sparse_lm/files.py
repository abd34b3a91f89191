"""Writes files that appear whole or not at all, and says which paths no file can have."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def unusable(path: str | os.PathLike) -> str | None:
    """Says why nothing can be kept at a path, whatever the disk; None if it can."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", os.fspath(path)):
        return "must be a path, not a URL; mount the bucket, as with gcsfuse, and name that"
    try:
        os.path.realpath(path).encode()  # TensorStore and tokenizers take no other names
    except UnicodeEncodeError:
        return "the name is not UTF-8; use another"
    return None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path to write to, which takes the place of `path` once it is written completely, and on disk.

    Whoever opens `path` finds all of the new file, or all of what was there before, whenever the writer is
    killed or the power fails. Its directory is made if need be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes a value, which must have no NaN or infinity, as JSON: all of it or nothing."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
