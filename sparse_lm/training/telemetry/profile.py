"""A trace of some of a run's steps, for XProf (`xprof --logdir=<workdir>/profile`) or Perfetto."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import jax

_log = logging.getLogger(__name__)


class StepProfile(contextlib.AbstractContextManager):
    """Traces steps of this process into `<workdir>/profile`, with the evaluations and saves between them.

    Starting and stopping take seconds, and the device should have nothing left to do: the caller asks whether the
    trace `turns` before a step, waits, and then calls `turn`. Of `steps` those before `start` are over, and a warning
    says so.
    """

    def __init__(self, workdir: str | os.PathLike, steps: range, start: int):
        if steps and steps.start < start:
            _log.warning("--profile_steps=%d,%d: the run goes on from step %d", steps.start, steps.stop, start)
        self._directory, self._steps, self._tracing = Path(workdir, "profile"), steps, False

    def turns(self, step: int) -> bool:
        """Returns whether the trace starts or stops before `step`."""
        return (step in self._steps) != self._tracing

    def turn(self) -> None:
        """Starts the trace, or stops it."""
        if self._tracing:
            jax.profiler.stop_trace()
        else:
            jax.profiler.start_trace(self._directory)
        self._tracing = not self._tracing

    def __exit__(self, *_: object) -> None:
        if self._tracing:
            self.turn()
