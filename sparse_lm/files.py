"""Writes files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


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
