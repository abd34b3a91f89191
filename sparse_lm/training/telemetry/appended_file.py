"""Files that tell of a run and must not stop it: what a full disk refuses waits in memory until it has room."""

from __future__ import annotations

import logging
from pathlib import Path

_log = logging.getLogger(__name__)


class AppendedFile:
    """Appends to a file, at once if the disk takes it.

    Args:
      path: of the file; it is made if need be.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting = b""  # from any byte on: a disk may take a part of what it is given
        self._failing = False

    def write(self, content: bytes) -> None:
        self._waiting += content
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not self._failing:
                _log.error("%s cannot be written, what comes now waits: %s", self._path, error.strerror)
            self._failing = True
        else:
            self._failing = False

    def close(self) -> None:
        self.write(b"")
        if self._waiting:
            _log.error("%s lacks its last %d bytes", self._path, len(self._waiting))
        self._file.close()
