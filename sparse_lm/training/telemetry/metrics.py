"""A run's metrics: metrics.jsonl for programs, TensorBoard event files for eyes, and Weights & Biases if asked for."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from sparse_lm.files import replacing
from sparse_lm.training.telemetry.appended_file import AppendedFile
from sparse_lm.training.telemetry.wandb_run import WandbRun

_log = logging.getLogger(__name__)

FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends to `metrics.jsonl` and `tensorboard/` of a workdir.

    A resumed run repeats the steps since its checkpoint. What an earlier process wrote about them is
    dropped first, so that each step has one line, and a run that was killed leaves the same trace as
    one that was not. A disk that is full does not stop a run: see `telemetry`.

    Args:
      workdir: an existing directory.
      resume_step: the first step that will be written; lines from this step on are dropped.
      wandb_run: gets what TensorBoard gets, and is closed with this writer.
    """

    def __init__(self, workdir: str | os.PathLike, resume_step: int = 0, wandb_run: WandbRun | None = None):
        # tensorboardX imports PyTorch where that is installed: seconds that only a run which logs should take.
        from sparse_lm.training.telemetry.scalar_events import ScalarEvents

        lines = Path(workdir, FILE)
        _drop_from(lines, resume_step)
        self._lines = AppendedFile(lines)
        self._events = ScalarEvents(Path(workdir, "tensorboard"), resume_step)
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
        values = dict(zip(metrics, jax.device_get(list(metrics.values())), strict=True))
        line = {"step": step, **{name: _plain(value) for name, value in values.items()}}
        self._lines.write(f"{to_json(line)}\n".encode())
        scalars = dict(pair for name in values for pair in _scalars(name, line[name]))
        self._events.write(step, scalars)
        if self._wandb_run:
            self._wandb_run.write(step, scalars)
        return line

    def close(self, failed: bool = False) -> None:
        self._lines.close()
        self._events.close()
        if self._wandb_run:
            self._wandb_run.close(failed)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(failed=error is not None)


def to_json(values: Mapping[str, Any]) -> str:
    """Writes one JSON object on one line: numbers, strings, None and arrays, NaN and infinities as null."""
    return json.dumps({name: _plain(value) for name, value in values.items()}, allow_nan=False)


def read_metrics(workdir: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """Yields the lines of a workdir's metrics.jsonl, oldest first, without damaged ones.

    Raises:
      FileNotFoundError: there is none.
    """
    yield from (values for _, values in _whole_lines(Path(workdir, FILE)))


def _drop_from(path: Path, step: int) -> None:
    """Rewrites a JSONL file without its lines of `step` and later, damaged ones, and a last one cut short."""
    if not path.exists():
        return
    with replacing(path) as partial, partial.open("wb") as new:
        new.writelines(line for line, values in _whole_lines(path) if values["step"] < step)


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each line of a JSONL file, as it is and as read, but a last one that a kill has cut short.

    Other damage, such as a cut line that another was appended to, is left out with a warning.
    """
    damaged = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            values = _parse(line)
            if values is None:
                damaged.append(number)
            else:
                yield line, values
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        _log.warning("%s: line %d%s cannot be read and is left out", path, damaged[0], more)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parses a line of metrics.jsonl; None if it is damaged."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and type(values.get("step")) is int else None


def _plain(value: Any) -> Any:
    """Converts `value` to what JSON has."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _scalars(name: str, value: Any) -> list[tuple[str, float]]:
    """Lists (tag, value) for all that TensorBoard can plot in `value`."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    tagged = [(name, value), *((f"{name}/{index}", entry) for index, entry in entries)]
    return [(tag, scalar) for tag, scalar in tagged if isinstance(scalar, (bool, int, float))]
