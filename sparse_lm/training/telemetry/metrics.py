"""A run's metrics: metrics.jsonl for programs, TensorBoard event files for eyes, and Weights & Biases if asked for."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from sparse_lm.files import replacing

_log = logging.getLogger(__name__)

FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends to `metrics.jsonl` and `tensorboard/` of a workdir.

    A resumed run repeats the steps since its checkpoint. What an earlier process wrote about them is
    dropped first, so that each step has one line, and a run that was killed leaves the same trace as
    one that was not. A disk that is full does not stop a run: what it refuses waits in memory.

    Args:
      workdir: an existing directory.
      resume_step: the first step that will be written; lines from this step on are dropped.
      wandb_run: of `wandb_run.open_run`; gets what TensorBoard gets, and is finished with this writer.
    """

    def __init__(self, workdir: str | os.PathLike, resume_step: int = 0, wandb_run: Any = None):
        lines = Path(workdir, FILE)
        if lines.exists():
            with replacing(lines) as partial, partial.open("wb") as kept:
                kept.writelines(line for line, values in _whole_lines(lines) if values["step"] < resume_step)
        self._lines = _AppendedFile(lines)
        self._events = _ScalarEvents(Path(workdir, "tensorboard"), resume_step)
        self._wandb_run = wandb_run

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Writes one step. The JSON line and the events are on their way to disk at return.

        Args:
          step: becomes the line's "step".
          metrics: by name, a number, string, None, numbers by name, or array of any rank (device arrays
            are fetched here, all at once). NaN and infinities become null, which JSON has and TensorBoard
            skips. TensorBoard gets scalars, and vectors and numbers by name as one scalar per entry
            ("name/0", "name/1", ...); strings and arrays of higher rank are in the JSON lines only.

        Returns:
          The line, as `read_metrics` gives it.
        """
        line = _plain({"step": step, **dict(zip(metrics, jax.device_get(list(metrics.values())), strict=True))})
        self._lines.write(f"{to_json(line)}\n".encode())
        scalars = dict(pair for name in metrics for pair in _scalars(name, line[name]))
        self._events.write(step, scalars)
        if self._wandb_run:
            self._wandb_run.log(scalars, step=step)  # which ignores steps that an earlier process has logged
        return line

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lines.close()
        self._events.close()
        if self._wandb_run:
            self._wandb_run.finish(exit_code=int(error is not None))


def to_json(values: Mapping[str, Any]) -> str:
    """Writes one JSON object on one line: numbers, strings, None and arrays, NaN and infinities as null."""
    return json.dumps(_plain(values), allow_nan=False)


def read_metrics(workdir: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """Yields the lines of a workdir's metrics.jsonl, oldest first, without damaged ones.

    Raises:
      FileNotFoundError: there is none.
    """
    yield from (values for _, values in _whole_lines(Path(workdir, FILE)))


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each line of a JSONL file, as it is and as read, but a last one that a kill has cut short.

    Other damage, such as a cut line that another was appended to, is left out with a warning.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            with contextlib.suppress(ValueError):
                values = json.loads(line)
                if isinstance(values, dict) and type(values.get("step")) is int:
                    yield line, values
                    continue
            _log.warning("%s: line %d cannot be read and is left out", path, number)


def _plain(value: Any) -> Any:
    """Converts `value` to what JSON has."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _scalars(name: str, value: Any) -> list[tuple[str, float]]:
    """Lists (tag, value) for all that TensorBoard can plot in `value`."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    tagged = [(name, value), *((f"{name}/{index}", entry) for index, entry in entries)]
    return [(tag, scalar) for tag, scalar in tagged if isinstance(scalar, (bool, int, float))]


class _AppendedFile:
    """Appends to a file, at once if the disk takes it. What a full disk refuses waits in memory."""

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting = b""  # from any byte on: a disk may take a part of what it is given

    def write(self, content: bytes) -> None:
        failing = bool(self._waiting)
        self._waiting += content
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not failing:
                _log.error("%s cannot be written, what comes now waits: %s", self._path, error.strerror)

    def close(self) -> None:
        self.write(b"")
        if self._waiting:
            _log.error("%s lacks its last %d bytes", self._path, len(self._waiting))
        self._file.close()


class _ScalarEvents:
    """Writes TensorBoard scalars.

    tensorboardX's own writer hands events to a thread, which an error ends; once its queue is full, the
    next event would wait for ever.

    Args:
      directory: of the event files; it is made if need be.
      purge_step: TensorBoard hides what earlier files have of this step and later ones.
    """

    def __init__(self, directory: Path, purge_step: int):
        # tensorboardX imports PyTorch where that is installed: seconds that only a run which logs should take.
        from tensorboardX.proto import event_pb2, summary_pb2
        from tensorboardX.record_writer import masked_crc32c

        self._proto, self._summary, self._checksum = event_pb2, summary_pb2.Summary, masked_crc32c
        directory.mkdir(exist_ok=True)
        self._file = _AppendedFile(directory / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}")
        self._write(file_version="brain.Event:2")
        self._write(step=purge_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the scalars of a step by tag."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        """Frames an event as TFRecord files do."""
        event = self._proto.Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(event))
        of_length, of_event = (struct.pack("<I", self._checksum(part)) for part in (length, event))
        self._file.write(length + of_length + event + of_event)
