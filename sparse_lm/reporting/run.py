"""A run as its workdir tells it, in arrays."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from sparse_lm.training.telemetry.metrics import read_metrics
from sparse_lm.training.telemetry.summary import read_summary
from sparse_lm.training.workdir import WorkdirError

COLORS = ("#3d85c6", "#e0862a", "#2e9e73", "#d1495b", "#9069c4", "#b8952b", "#3aa6b9", "#c763a3")


@dataclasses.dataclass(frozen=True)
class Run:
    """Holds what a run has logged, one entry a line of metrics.jsonl.

    Attributes:
      name: as reports call it.
      color: of its curves.
      lines: of metrics.jsonl, oldest first; at least one.
      summary: of summary.json; None if there is none.
      config: of config.json, by flattened key.
    """

    name: str
    color: str
    lines: Sequence[dict[str, Any]]
    summary: dict[str, Any] | None
    config: Mapping[str, Any]

    def numbers(self, key: str) -> np.ndarray:
        """Returns f64[lines]: a number by line, the mean over layers where each has one; NaN where it is not finite.

        "expert_load" is that of the busiest expert, as a multiple of an even load.
        """
        return np.array([_number(key, line.get(key)) for line in self.lines])

    def curves(self, key: str) -> dict[str, np.ndarray]:
        """Returns the numbers of `key` by the names that they were logged with, or by "" where they have none."""
        logged = [line[key] if isinstance(line.get(key), dict) else {} for line in self.lines]
        names = dict.fromkeys(name for values in logged for name in values)
        if not names:
            return {"": self.numbers(key)}
        return {name: np.array([_number(key, values.get(name)) for values in logged]) for name in names}

    def bad(self, key: str) -> np.ndarray:
        """Returns bool[lines]: where this number was logged and was not finite."""
        return np.array([key in line and line[key] is None for line in self.lines])

    def sparse_spans(self, key: str) -> list[tuple[float, float]]:
        """Returns where the sparse phases begin and end, on the axis of a number that grows from 0.

        An edge lies half-way between the last line logged before it and the first one behind it. Lines
        without this number are left out.
        """
        lines = [line for line in self.lines if line.get(key) is not None]
        x = np.array([line[key] for line in lines], dtype=float)
        edges = np.concatenate([[0.0], (x[:-1] + x[1:]) / 2, x[-1:]])
        spans, first = [], 0
        for phase, stretch in itertools.groupby(line["phase"] for line in lines):
            end = first + len(list(stretch))
            if phase == "sparse":
                spans.append((float(edges[first]), float(edges[end])))
            first = end
        return spans


def _number(key: str, value: Any) -> float:
    array = np.array(np.nan if value is None else value, dtype=float)
    if key == "expert_load" and array.ndim == 2:
        return float((array.max(axis=1) * array.shape[1]).mean())
    return float(array.mean())


def block_means(values: np.ndarray, most: int) -> np.ndarray:
    """Thins f64[n] to f64[min(n, most)] by means over what is finite of neighbours; NaN if nothing is."""
    count = min(len(values), most)
    starts = np.arange(count) * len(values) // count
    finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
    counts = np.add.reduceat(finite.astype(int), starts)
    return np.where(counts, sums / np.maximum(counts, 1), np.nan)


def shared_spans(runs: Sequence[Run], key: str) -> list[tuple[float, float]] | None:
    """Returns the sparse phases of all runs that have any, if these agree to a thousandth; else None."""
    spans = [np.array(run.sparse_spans(key)) for run in runs]
    sparse = [edges for edges in spans if len(edges)]
    if all(edges.shape == sparse[0].shape and np.allclose(edges, sparse[0], rtol=1e-3) for edges in sparse):
        return [tuple(edges) for edges in sparse[0].tolist()] if sparse else []
    return None


def read_runs(workdirs: Sequence[str | os.PathLike]) -> list[Run]:
    """Reads the runs of these workdirs, which may still be training, or have been stopped.

    Each is named by its directory's own name, or by its whole path if several share that name.

    Raises:
      WorkdirError: one of them holds no run, or none that has logged a step yet.
    """
    names = [Path(workdir).resolve().name for workdir in workdirs]
    names = [
        name if names.count(name) == 1 else os.fspath(workdir) for workdir, name in zip(workdirs, names, strict=True)
    ]
    return [_read_run(*named) for named in zip(workdirs, names, itertools.cycle(COLORS), strict=False)]


def _read_run(workdir: str | os.PathLike, name: str, color: str) -> Run:
    try:
        config = json.loads(Path(workdir, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkdirError(workdir, "holds no run (no config.json that can be read)") from error
    try:
        lines = list(read_metrics(workdir))
    except FileNotFoundError:
        lines = []
    if not lines:
        raise WorkdirError(workdir, "its run has not logged a step yet (nothing in metrics.jsonl)")
    return Run(name, color, lines, read_summary(workdir), flatten_dict(config, sep="."))
