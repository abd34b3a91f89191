"""TensorBoard scalars, through a file that a full disk does not stop."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from sparse_lm.training.telemetry.appended_file import AppendedFile


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
    """Frames an event as TFRecord files do."""
    length = struct.pack("<Q", len(content))
    return length + _checksum(length) + content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(content))
