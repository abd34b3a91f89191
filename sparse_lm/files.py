"""Writes files that appear whole or not at all, and locks files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from sparse_lm.errors import OutputError, WorkdirError

_log = logging.getLogger(__name__)

NO_URL = "must be a path, not a URL; mount the bucket, as with gcsfuse"


@contextlib.contextmanager
def writing(refusal: type[OutputError | WorkdirError], path: str | os.PathLike, file: str = "") -> Iterator[None]:
    """Raises `refusal`, of this path, for what the system has against writing there, or to a file below."""
    try:
        yield
    except OSError as error:
        raise refusal(path, f"{file} cannot be written: {error.strerror or error}".lstrip()) from error


def free_place(output: Path) -> Path:
    """Returns where to write a directory that is to appear by one rename: `output`, or what a link leads to.

    Raises:
      OutputError: something is there that is no empty directory, or that a rename cannot or must not replace.
    """
    try:
        place = output.resolve()
        is_free = place.is_dir() and not (any(place.iterdir()) or place.is_mount() or place == Path.cwd())
        if is_free or not os.path.lexists(place):
            return place
    except RuntimeError:  # of links that lead to each other
        pass
    except OSError as error:
        raise OutputError(output, f"cannot be written: {error}") from error
    raise OutputError(output, "must be a new or an empty directory, no mount point and not the current one")


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


def try_lock(file: TextIO) -> bool:
    """Takes flock(2) of an open file, which the system releases when the process ends, however it ends.

    Linux passes such locks on to an NFS server, so that they hold between hosts.

    Returns:
      False if another process holds it. True, with a warning, on a file system without locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.warning("%s cannot be locked (%s): let no other process write there meanwhile", file.name, error.strerror)
    return True
