"""A run in one file, summary.json: how far it came, its losses, what it took, and on what."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from sparse_lm.config import Config
from sparse_lm.errors import WorkdirError
from sparse_lm.files import write_json, writing
from sparse_lm.training.telemetry.metrics import read_metrics

_log = logging.getLogger(__name__)

FILE = "summary.json"
COMPILE_EVENTS = "/jax/core/compile/"  # JAX's names of tracing, lowering and compiling start so
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_ROOT = Path(__file__).parents[3]


class RunSummary:
    """Keeps `<workdir>/summary.json` while a process trains, and tells where its time goes.

    Every second since it was made is sorted into one kind of work, which is named when it is done. What JAX took
    meanwhile to trace, lower and compile is told apart as "compile", whichever work asked for it. While open, it
    listens to JAX's events.

    The file is written with every checkpoint and when training ends, whatever ends it. Each process of a run has its
    entry, and the run's time is the sum of theirs: steps that a resumed run repeats count as often as they were
    computed. Of a process that was killed, what came after its last checkpoint is not known.

    The file:
      state: "running" (or killed), "finished", "stopped by <signal>" or "failed: <error>".
      step, steps, tokens: steps done, of how many; tokens trained on, repeated steps left out.
      loss, skipped: of the last logged step; a loss in nats per token, or null if not finite.
      evaluation, best_evaluation: step (0-based), loss, perplexity and bits_per_byte of the last held-out evaluation,
        and of the one of least loss among those behind the sparse phase; null if there was none.
      wall_time: seconds, of all processes.
      seconds: the same by kind of work: setup, dense, sparse (steps, with the transitions before them), compile,
        evaluation, checkpoint, profile, other.
      tokens_per_second: by phase, in the seconds of that phase; "overall", in all of wall_time.
      processes: of each, start_step, step, steps by phase, started (UTC), seconds, device, versions, git_commit.
    """

    def __init__(self, workdir: str | os.PathLike, config: Config, clock: Callable[[], float] = time.perf_counter):
        self._workdir, self._config, self._clock = workdir, config, clock
        self._seconds: Counter[str] = Counter()
        self._last, self._compiling = clock(), 0.0
        self._process: dict[str, Any] | None = None  # until it trains
        self.state = "running"

    def begin(self, step: int) -> None:
        """Starts a process that trains from `step` on; metrics.jsonl has the steps before it, and no others."""
        before = read_summary(self._workdir)
        device = jax.devices()[0]
        self._earlier = before["processes"] if before else []
        self._process = {
            "start_step": step,
            "step": step,
            "steps": Counter(),
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": self._seconds,
            # This machine may have more devices.
            "device": dict(kind=device.device_kind, platform=device.platform, count=self._config.mesh.devices),
            "versions": _versions(),
            "git_commit": git_commit(),
        }
        self._line: Mapping[str, Any] = {"loss": None, "skipped": 0}  # the last one logged
        self._evaluations: list[dict[str, Any]] = []
        for line in read_metrics(self._workdir):
            self.logged(line)
        self.spent_on("setup")

    def spent_on(self, kind: str) -> float:
        """Counts the time since the last call of this or of `step_done` as work of this kind.

        Returns the seconds, less those in which JAX compiled.
        """
        now = self._clock()
        elapsed = now - self._last
        compiling = min(self._compiling, elapsed)  # threads may compile side by side
        self._seconds["compile"] += compiling
        self._seconds[kind] += elapsed - compiling
        self._last, self._compiling = now, 0.0
        return elapsed - compiling

    def step_done(self, phase: str) -> float:
        """Counts the next step as done; returns the seconds since the last call, which are its own."""
        self._process["step"] += 1
        self._process["steps"][phase] += 1
        return self.spent_on(phase)

    def wall_time(self) -> float:
        """Adds up the seconds of all processes, up to the last call of `step_done` or `spent_on`."""
        return self._sum("seconds").total()

    def logged(self, line: Mapping[str, Any]) -> None:
        """Takes the losses from a line of metrics.jsonl."""
        self._line = line
        if "eval_loss" in line:
            names = ("loss", "perplexity", "bits_per_byte")
            self._evaluations.append({"step": line["step"], **{name: line.get(f"eval_{name}") for name in names}})

    def write(self) -> None:
        """Writes the file, all of it or nothing; raises WorkdirError if it cannot be written."""
        seconds, steps = self._sum("seconds"), self._sum("steps")
        per_step = self._config.tokens_per_step
        speeds = {phase: per_step * steps[phase] / seconds[phase] for phase in steps if seconds[phase]}
        if steps:
            speeds["overall"] = per_step * steps.total() / seconds.total()
        finite = [
            evaluation
            for evaluation in self._evaluations
            if evaluation["loss"] is not None and self._config.can_be_best(evaluation["step"] + 1)
        ]
        contents = {
            "state": self.state,
            "step": self._process["step"],
            "steps": self._config.steps,
            "tokens": self._process["step"] * per_step,
            "loss": self._line["loss"],
            "skipped": self._line["skipped"],
            "evaluation": self._evaluations[-1] if self._evaluations else None,
            "best_evaluation": min(finite, key=lambda evaluation: evaluation["loss"], default=None),
            "wall_time": seconds.total(),
            "seconds": seconds,
            "tokens_per_second": speeds,
            "processes": [*self._earlier, self._process],
        }
        with writing(WorkdirError, self._workdir, FILE):
            write_json(Path(self._workdir, FILE), contents)

    def _sum(self, table: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for process in [*self._earlier, self._process]:
            total.update(process[table])
        return total

    def _note(self, event: str, seconds: float, **_: object) -> None:
        if event.startswith(COMPILE_EVENTS):
            self._compiling += seconds

    def __enter__(self) -> RunSummary:
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)
        if self._process is None:
            return
        if error is not None:
            self.state = f"failed: {type(error).__name__}"
        self.spent_on("other" if error else "checkpoint")  # a last one may have been waited for
        with contextlib.suppress(*([WorkdirError] if error else [])):  # the disk may be what ended the run
            self.write()


def read_summary(workdir: str | os.PathLike) -> dict[str, Any] | None:
    """Reads summary.json (see `RunSummary`); None if there is none yet, or, with a warning, if it is damaged."""
    path = Path(workdir, FILE)
    if not path.exists():
        return None
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        sum(sum(process[table].values()) for process in summary["processes"] for table in ("seconds", "steps"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        _log.warning("%s cannot be read and counts as none: %r", path, error)
        return None
    return summary


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # the CUDA plugin on a CPU's machine
            versions[package] = importlib.metadata.version(package)
    return versions


def git_commit(root: Path = _ROOT) -> str | None:
    """Returns the commit of a checkout, with "-dirty" if tracked files have changed since.

    None if `root` is not the top of a checkout, or git cannot tell. Nothing is written there, not even a lock, which a
    run that is killed would leave behind.
    """
    if not (root / ".git").exists():
        return None  # a directory further up may be some other project's
    git = ["git", "--no-optional-locks", "-C", str(root)]
    try:
        commit, changes = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}-dirty" if changes else commit
