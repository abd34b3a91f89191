"""Seconds per training step and seconds left, without the time that compiling takes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable

from sparse_lm.config import Config


class StepTimer:
    """Times the steps of this process.

    The first step of a phase is not timed, because it waits for its compilation (or, in a phase
    that was entered before, for the transition at its edge). Time left is reckoned phase by phase,
    as sparse and dense steps differ, and only from steps of this process, so that it is right after
    a resume, too. A phase that has not been timed yet is taken to run like the others.

    Args:
      config: the run.
      start_step: the first step of this process; 0 unless it resumes.
      clock: seconds, monotonic.
    """

    def __init__(self, config: Config, start_step: int, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._last = clock()
        self._phase: str | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._timed: Counter[str] = Counter()
        self._left = Counter(config.phase(step) for step in range(start_step, config.steps))
        self._lap_seconds, self._lap_steps = 0.0, 0

    def step_done(self, phase: str) -> None:
        """Times a step whose results have arrived."""
        now = self._clock()
        if phase == self._phase:
            self._seconds[phase] += now - self._last
            self._timed[phase] += 1
            self._lap_seconds += now - self._last
            self._lap_steps += 1
        else:
            self._lap_seconds, self._lap_steps = 0.0, 0  # of the phase before
        self._left[phase] -= 1
        self._last, self._phase = now, phase

    def skip(self) -> None:
        """Leaves what was done since the last step (evaluating, saving, compiling) out of the next step's time."""
        self._last = self._clock()

    def lap(self) -> float | None:
        """Returns mean seconds of this phase's steps timed since the last lap; None if there was none."""
        mean = self._lap_seconds / self._lap_steps if self._lap_steps else None
        self._lap_seconds, self._lap_steps = 0.0, 0
        return mean

    def seconds_left(self) -> float | None:
        """Estimates what is left of training, without evaluations and saves; None before the first timed step."""
        if not self._timed:
            return None
        mean = sum(self._seconds.values()) / self._timed.total()
        return sum(
            steps * (self._seconds[phase] / self._timed[phase] if self._timed[phase] else mean)
            for phase, steps in self._left.items()
        )
