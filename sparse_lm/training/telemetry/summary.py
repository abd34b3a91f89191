"""A run in one file, summary.json: how far it came, its losses, what it took, and on what."""

from __future__ import annotations

import datetime
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from sparse_lm.config import Config
from sparse_lm.files import write_json
from sparse_lm.training.telemetry.metrics import read_metrics
from sparse_lm.training.telemetry.provenance import provenance
from sparse_lm.training.telemetry.wall_time import WallTime

_log = logging.getLogger(__name__)

FILE = "summary.json"


class RunSummary:
    """Keeps `<workdir>/summary.json` while a process trains.

    It is written with every checkpoint and when training ends, whatever ends it. Each process of a run
    has its entry, and the run's time is the sum of theirs: steps that a resumed run repeats count
    as often as they were computed. Of a process that was killed, what came after its last checkpoint
    is not known.

    The file:
      state: "running" (or killed), "finished", "stopped by <signal>" or "failed: <error>".
      step, steps, tokens: steps done, of how many; tokens trained on, repeated steps left out.
      loss, skipped: of the last logged step; a loss in nats per token, or null if not finite.
      evaluation, best_evaluation: step, loss, perplexity and bits_per_byte of the last held-out
        evaluation, and of the one of least loss; null if there was none.
      wall_time: seconds, of all processes.
      seconds: the same by kind of work: setup, dense, sparse (steps and what happens at the edges of
        their phase), compile, evaluation, checkpoint, profile, other.
      tokens_per_second: by phase, in the seconds of that phase; "overall", in all of wall_time.
      processes: of each, start_step, step, steps by phase, started (UTC), seconds, device, versions, git_commit.

    Args:
      workdir: an existing directory.
      config: the run.
      clock: seconds, monotonic.
    """

    def __init__(self, workdir: str | os.PathLike, config: Config, clock: Callable[[], float] = time.perf_counter):
        self._workdir, self._config = workdir, config
        self._wall = WallTime(clock)
        self._process: dict[str, Any] | None = None  # until it trains
        self.state = "running"

    def begin(self, step: int) -> None:
        """Starts a process that trains from `step` on; metrics.jsonl has the steps before it, and no others."""
        before = read_summary(self._workdir)
        self._earlier = before["processes"] if before else []
        self._process = {
            "start_step": step,
            "step": step,
            "steps": Counter(),
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": self._wall.seconds,
            **provenance(),
        }
        self._loss, self._skipped, self._evaluation, self._best = None, 0, None, None
        for line in read_metrics(self._workdir):
            self.logged(line)
        self.spent_on("setup")

    def spent_on(self, kind: str) -> None:
        """Counts the time since the last call of this or of `step_done` as work of this kind."""
        self._wall.spent_on(kind)

    def step_done(self, phase: str) -> None:
        """Counts the next step as done, and the time since the last call as its own."""
        self._process["step"] += 1
        self._process["steps"][phase] += 1
        self._wall.spent_on(phase)

    def wall_time(self) -> float:
        """Adds up the seconds of all processes, up to the last call of `step_done` or `spent_on`."""
        return _sum(self._processes(), "seconds").total()

    def logged(self, line: Mapping[str, Any]) -> None:
        """Takes the losses from a line of metrics.jsonl."""
        self._loss, self._skipped = line["loss"], line["skipped"]
        if "eval_loss" not in line:
            return
        names = ("loss", "perplexity", "bits_per_byte")
        self._evaluation = {"step": line["step"], **{name: line[f"eval_{name}"] for name in names}}
        loss = self._evaluation["loss"]
        if loss is not None and (self._best is None or loss < self._best["loss"]):
            self._best = self._evaluation

    def write(self) -> None:
        """Writes the file, all of it or nothing. A full disk leaves the one before, and does not stop the run."""
        path = Path(self._workdir, FILE)
        try:
            write_json(path, self._contents())
        except OSError as error:
            _log.error("%s cannot be written: %s", path, error.strerror)

    def _contents(self) -> dict[str, Any]:
        seconds, steps = (_sum(self._processes(), table) for table in ("seconds", "steps"))
        per_step = self._config.tokens_per_step
        speeds = {phase: per_step * steps[phase] / seconds[phase] for phase in steps if seconds[phase]}
        if steps:
            speeds["overall"] = per_step * steps.total() / seconds.total()
        return {
            "state": self.state,
            "step": self._process["step"],
            "steps": self._config.steps,
            "tokens": self._process["step"] * per_step,
            "loss": self._loss,
            "skipped": self._skipped,
            "evaluation": self._evaluation,
            "best_evaluation": self._best,
            "wall_time": seconds.total(),
            "seconds": seconds,
            "tokens_per_second": speeds,
            "processes": self._processes(),
        }

    def _processes(self) -> list[dict[str, Any]]:
        return [*self._earlier, self._process]

    def __enter__(self) -> RunSummary:
        self._wall.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._wall.__exit__(kind, error, trace)
        if self._process is None:
            return
        if error is not None:
            self.state = f"failed: {type(error).__name__}"
        self.spent_on("other" if error else "checkpoint")  # a last one may have been waited for
        self.write()


def read_summary(workdir: str | os.PathLike) -> dict[str, Any] | None:
    """Reads summary.json (see `RunSummary`); None if there is none yet, or, with a warning, if it is damaged."""
    path = Path(workdir, FILE)
    if not path.exists():
        return None
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(summary, dict) or not isinstance(summary.get("processes"), list):
            raise ValueError("it lists no processes")
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be read and counts as none: %s", path, error)
        return None
    return summary


def _sum(processes: list[dict[str, Any]], table: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for process in processes:
        total.update(process[table])
    return total
