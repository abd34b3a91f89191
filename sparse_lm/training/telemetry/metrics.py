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
from typing import Any

import jax
import numpy as np

from sparse_lm.errors import WorkdirError
from sparse_lm.files import replacing, writing

_log = logging.getLogger(__name__)

FILE = "metrics.jsonl"


class MetricsWriter(contextlib.AbstractContextManager):
    """Appends to `metrics.jsonl` and `tensorboard/` of a workdir.

    A resumed run repeats the steps since its checkpoint. What an earlier process wrote about them is dropped first, so
    that each step has one line, and a run that was killed leaves the same trace as one that was not.

    `resume_step` is the first step that will be written. `wandb_run`, of `wandb_run.open_run`, gets what TensorBoard
    gets, and is finished with this writer.

    Raises:
      WorkdirError: a file cannot be written, now or later.
    """

    def __init__(self, workdir: str | os.PathLike, resume_step: int = 0, wandb_run: Any = None):
        # tensorboardX imports PyTorch where that is installed: seconds that only a run which logs should take. Its own
        # writer syncs each event to disk, which waits for a checkpoint that is being written there.
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary, self._wandb_run = event_pb2.Event, summary_pb2.Summary, wandb_run
        self._workdir = workdir
        self._events = f"tensorboard/events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        lines = Path(workdir, FILE)
        with writing(WorkdirError, workdir):
            if lines.exists():
                with replacing(lines) as partial, partial.open("wb") as kept:
                    kept.writelines(line for line, values in _whole_lines(lines) if values["step"] < resume_step)
            Path(workdir, "tensorboard").mkdir(exist_ok=True)
        self._write_event(file_version="brain.Event:2")
        # TensorBoard hides what earlier files have of this step and later ones.
        self._write_event(step=resume_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Writes one step, and returns the line as `read_metrics` gives it.

        Metrics are, by name, a number, string, None, or array of any rank (device arrays are fetched here, all at
        once). NaN and infinities become null, which JSON has and TensorBoard skips. TensorBoard gets scalars, and
        vectors as one scalar per entry ("name/0", "name/1", ...); strings and arrays of higher rank are in the JSON
        lines only.
        """
        line = _plain({"step": step, **dict(zip(metrics, jax.device_get(list(metrics.values())), strict=True))})
        self._append(FILE, f"{to_json(line)}\n".encode())
        scalars = dict(pair for name in metrics for pair in _scalars(name, line[name]))
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write_event(step=step, summary=self._summary(value=values))
        if self._wandb_run:
            self._wandb_run.log(scalars, step=step)  # which ignores steps that an earlier process has logged
        return line

    def _write_event(self, **fields: Any) -> None:
        """Writes an event with the length and the checksums that TFRecord files have."""
        from tensorboardX.record_writer import masked_crc32c

        event = self._event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(event))
        of_length, of_event = (struct.pack("<I", masked_crc32c(part)) for part in (length, event))
        self._append(self._events, length + of_length + event + of_event)

    def _append(self, file: str, content: bytes) -> None:
        with writing(WorkdirError, self._workdir, file), Path(self._workdir, file).open("ab") as opened:
            opened.write(content)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if self._wandb_run:
            self._wandb_run.finish(exit_code=int(error is not None))


def to_json(values: Mapping[str, Any]) -> str:
    """Writes one JSON object on one line: numbers, strings, None and arrays, NaN and infinities as null."""
    return json.dumps(_plain(values), allow_nan=False)


def read_metrics(workdir: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """Yields the lines of a workdir's metrics.jsonl, if there is one, oldest first, without damaged ones."""
    path = Path(workdir, FILE)
    yield from (values for _, values in (_whole_lines(path) if path.exists() else ()))


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
    entries = value if isinstance(value, list) else []
    tagged = [(name, value), *((f"{name}/{index}", entry) for index, entry in enumerate(entries))]
    return [(tag, scalar) for tag, scalar in tagged if isinstance(scalar, (bool, int, float))]
