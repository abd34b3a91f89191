"""Seconds per training step and seconds left, without the time that compiling takes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

from sparse_lm.config import Config


class Lap(NamedTuple):
    """The steps timed since the lap before."""

    seconds: float  # of a step, the mean
    steps: Counter[str]  # how many of each kind


class StepTimer:
    """Times the steps of this process, by kind (`Config.step_kind`).

    The first step of each kind in a phase is not timed, because it waits for its compilation (or, in a
    phase that was entered before, for the transition at its edge). Time left is reckoned kind by kind,
    as sparse and dense steps differ, and only from steps of this process, so that it is right after
    a resume, too. A kind that has not been timed yet is taken to run like the others.

    Args:
      config: the run.
      start_step: the first step of this process; 0 unless it resumes.
      clock: seconds, monotonic.
    """

    def __init__(self, config: Config, start_step: int, clock: Callable[[], float] = time.perf_counter):
        self._config, self._clock = config, clock
        self._last = clock()
        self._phase: str | None = None
        self._seen: set[str] = set()  # kinds, in this phase
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._timed: Counter[str] = Counter()
        self._left = Counter(config.step_kind(step) for step in range(start_step, config.steps))
        self._lap_seconds, self._lap_steps = 0.0, Counter()

    def step_done(self, step: int) -> None:
        """Call when the results of a step have arrived."""
        now, phase, kind = self._clock(), self._config.phase(step), self._config.step_kind(step)
        if phase != self._phase:
            self._phase, self._seen = phase, set()
        if kind in self._seen:
            self._seconds[kind] += now - self._last
            self._timed[kind] += 1
            self._lap_seconds += now - self._last
            self._lap_steps[kind] += 1
        self._seen.add(kind)
        self._left[kind] -= 1
        self._last = now

    def skip(self) -> None:
        """Leaves what was done since the last step (an evaluation, a save) out of the next step's time."""
        self._last = self._clock()

    def lap(self) -> Lap | None:
        """The steps timed since the last lap; None if there was none."""
        lap = Lap(self._lap_seconds / self._lap_steps.total(), self._lap_steps) if self._lap_steps else None
        self._lap_seconds, self._lap_steps = 0.0, Counter()
        return lap

    def seconds_left(self) -> float | None:
        """Of training, evaluations and saves not included; None before the first timed step."""
        if not self._timed:
            return None
        mean = sum(self._seconds.values()) / self._timed.total()
        return sum(
            steps * (self._seconds[kind] / self._timed[kind] if self._timed[kind] else mean)
            for kind, steps in self._left.items()
        )
