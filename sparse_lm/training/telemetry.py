"""Files that tell of a run and must not stop it: what a full disk refuses waits in memory until it has room."""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

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


class ScalarEvents:
    """TensorBoard scalars.

    tensorboardX's own writer hands events to a thread, which an error ends; once its queue is full, the
    next event would wait for ever.

    Args:
      directory: of the event files; it is made if need be.
      purge_step: TensorBoard hides what earlier files have of this step and later ones.
    """

    def __init__(self, directory: Path, purge_step: int):
        directory.mkdir(exist_ok=True)
        self._file = AppendedFile(directory / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}")
        start = SessionLog(status=SessionLog.START)
        self._write(
            Event(wall_time=time.time(), file_version="brain.Event:2"),
            Event(wall_time=time.time(), step=purge_step, session_log=start),
        )

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Scalars of a step by tag."""
        now = time.time()
        self._write(*(Event(wall_time=now, step=step, summary=summary.scalar(*scalar)) for scalar in scalars.items()))

    def close(self) -> None:
        self._file.close()

    def _write(self, *events: Event) -> None:
        self._file.write(b"".join(_record(event.SerializeToString()) for event in events))


def _record(content: bytes) -> bytes:
    """As TFRecord files frame it."""
    length = struct.pack("<Q", len(content))
    return length + _checksum(length) + content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(content))
