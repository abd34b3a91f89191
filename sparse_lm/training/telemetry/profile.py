"""A trace of some of a run's steps, for XProf (`xprof --logdir=<workdir>/profile`) or Perfetto."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import jax

_log = logging.getLogger(__name__)


class StepProfile:
    """Traces the steps `first <= step < end` into `<workdir>/profile`; those of this process, if it resumes.

    Evaluations and saves between these steps, and after the run's last one, are in the trace, too.

    Starting and stopping take seconds, and the device should have nothing left to do: the caller asks
    whether it `turns` before a step, waits, and then calls `turn`.
    """

    def __init__(self, workdir: str | os.PathLike, first: int = 0, end: int = 0):
        self._directory = Path(workdir, "profile")
        self._steps = range(first, end)
        self.tracing = False

    def turns(self, step: int) -> bool:
        """Returns whether the trace starts or stops before `step`."""
        return (step in self._steps) != self.tracing

    def turn(self) -> None:
        """Starts the trace, or stops it."""
        if self.tracing:
            self.close()
        else:
            jax.profiler.start_trace(self._directory)
            self.tracing = True

    def __enter__(self) -> StepProfile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the trace if it has not been."""
        if self.tracing:
            jax.profiler.stop_trace()
            self.tracing = False
            _log.info("wrote a trace of steps %d to %d to %s", self._steps[0], self._steps[-1], self._directory)
