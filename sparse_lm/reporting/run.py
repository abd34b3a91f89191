"""A run as its workdir tells it, in arrays."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparse_lm.training.telemetry.metrics import read_metrics
from sparse_lm.training.telemetry.summary import read_summary
from sparse_lm.training.workdir import WorkdirError


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run has logged, one entry a line of metrics.jsonl.

    Attributes:
      name: as figures call it.
      lines: of metrics.jsonl, oldest first; at least one.
      summary: of summary.json; None if there is none.
    """

    name: str
    lines: Sequence[dict[str, Any]]
    summary: dict[str, Any] | None

    def numbers(self, key: str) -> np.ndarray:
        """f64[lines]: a number by line, NaN where it is absent or was not finite."""
        return np.array([line.get(key) for line in self.lines], dtype=float)

    def by_layer(self, key: str) -> np.ndarray:
        """f64[lines, layers], NaN where absent or not finite; [lines, 0] for a run that never logged it."""
        layers = max(len(line.get(key, ())) for line in self.lines)
        rows = [line.get(key, [None] * layers) for line in self.lines]
        return np.array(rows, dtype=float).reshape(len(rows), layers)

    def bad(self, key: str) -> np.ndarray:
        """bool[lines]: where this number was logged and was not finite."""
        return np.array([key in line and line[key] is None for line in self.lines])

    def sparse_spans(self, key: str) -> list[tuple[float, float]]:
        """Where the sparse phases begin and end, on the axis of a number that grows from 0.

        An edge lies half-way between the last line logged before it and the first one behind it. Lines
        without this number are left out.
        """
        lines = [line for line in self.lines if line.get(key) is not None]
        edges = edges_between(np.array([line[key] for line in lines], dtype=float))
        spans, first = [], 0
        for phase, stretch in itertools.groupby(line["phase"] for line in lines):
            end = first + len(list(stretch))
            if phase == "sparse":
                spans.append((float(edges[first]), float(edges[end])))
            first = end
        return spans


def edges_between(x: np.ndarray) -> np.ndarray:
    """f64[n] ascending -> f64[n + 1]: 0, the middles of neighbours, and the last."""
    return np.concatenate([[0.0], (x[:-1] + x[1:]) / 2, x[-1:]])


def read_runs(workdirs: Sequence[str | os.PathLike]) -> list[Run]:
    """The runs of these workdirs, which may still be training, or have been stopped.

    Each is named by its directory's own name, or by its whole path if several share that name.

    Raises:
      WorkdirError: one of them holds no run, or none that has logged a step yet.
    """
    names = [Path(workdir).resolve().name for workdir in workdirs]
    return [
        _read_run(workdir, name if names.count(name) == 1 else os.fspath(workdir))
        for workdir, name in zip(workdirs, names, strict=True)
    ]


def _read_run(workdir: str | os.PathLike, name: str) -> Run:
    if not Path(workdir, "config.json").exists():
        raise WorkdirError(workdir, "holds no run (no config.json)")
    try:
        lines = list(read_metrics(workdir))
    except FileNotFoundError:
        lines = []
    if not lines:
        raise WorkdirError(workdir, "its run has not logged a step yet (nothing in metrics.jsonl)")
    return Run(name, lines, read_summary(workdir))
