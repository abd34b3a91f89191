"""A run as its workdir tells it, in arrays."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from sparse_lm.errors import WorkdirError
from sparse_lm.training.telemetry.metrics import read_metrics
from sparse_lm.training.telemetry.summary import read_summary
from sparse_lm.training.workdir import read_config

COLORS = ("#3d85c6", "#e0862a", "#2e9e73", "#d1495b", "#9069c4", "#b8952b", "#3aa6b9", "#c763a3")


@dataclasses.dataclass(frozen=True)
class Run:
    """Holds what a run has logged."""

    name: str  # as reports call it
    color: str  # of its curves
    lines: Sequence[dict[str, Any]]  # of metrics.jsonl, oldest first; at least one
    summary: dict[str, Any] | None  # of summary.json; None if there is none
    config: Mapping[str, Any]  # of config.json, by flattened key

    def numbers(self, key: str) -> np.ndarray:
        """Returns f64[lines]: a number by line; NaN where it is not finite.

        Where each layer has one it is the mean, of 2:4 weights over layers that do not stay dense. "expert_load" is
        that of the busiest expert, as a multiple of an even load; layers without one have zeros, and are left out.
        """

        def number(value: Any) -> float:
            array = np.array(np.nan if value is None else value, dtype=float)
            if array.ndim == 1 and key in ("flip_rate", "kept_weight_energy"):
                array = array[self.config.get("sparsity.dense_layers", 0) :]
            if key == "expert_load" and array.ndim == 2:
                array = array[array.any(axis=1)].max(axis=1) * array.shape[1]
            return float(array.mean())

        return np.array([number(line.get(key)) for line in self.lines])

    def sparse_spans(self, key: str) -> list[tuple[float, float]]:
        """Returns where the sparse phases begin and end, on the axis of a number that grows from 0.

        An edge lies half-way between the last line logged before it and the first one behind it. Lines
        without this number are left out.
        """
        lines = [line for line in self.lines if line.get(key) is not None]
        x = np.array([line[key] for line in lines], dtype=float)
        edges = np.concatenate([[0.0], (x[:-1] + x[1:]) / 2, x[-1:]])
        is_sparse = np.array([False, *(line.get("phase") == "sparse" for line in lines), False])
        return edges[np.flatnonzero(is_sparse[1:] != is_sparse[:-1])].reshape(-1, 2).tolist()


def block_means(values: np.ndarray, most: int) -> np.ndarray:
    """Thins f64[n] to at most `most` means over what is finite of neighbours; NaN if nothing is."""
    size = -(-len(values) // most)
    blocks = np.pad(values, (0, -len(values) % size), constant_values=np.nan).reshape(-1, size)
    return np.ma.masked_invalid(blocks).mean(axis=1).filled(np.nan)


def read_runs(workdirs: Sequence[str | os.PathLike]) -> list[Run]:
    """Reads the runs of these workdirs, which may still be training, or have been stopped.

    Each is named by its directory's own name, or by its whole path if several share that name.

    Raises:
      WorkdirError: one of them has no config.json, or no run that has logged a step yet.
    """
    short = [Path(workdir).resolve().name for workdir in workdirs]
    runs = []
    for workdir, name, color in zip(workdirs, short, itertools.cycle(COLORS), strict=False):
        config, lines = read_config(workdir), list(read_metrics(workdir))
        if not lines:
            raise WorkdirError(workdir, "its run has not logged a step yet (nothing in metrics.jsonl)")
        name = name if short.count(name) == 1 else os.fspath(workdir)
        runs.append(Run(name, color, lines, read_summary(workdir), flatten_dict(config, sep=".")))
    return runs
