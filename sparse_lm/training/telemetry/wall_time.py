"""Tells where the wall time of a process goes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType

import jax

COMPILE_EVENTS = "/jax/core/compile/"  # JAX's names of tracing, lowering and compiling start so


class WallTime:
    """Sorts every second since it was made into one kind of work.

    Work is named when it is done. What JAX took meanwhile to trace, lower and compile is told apart
    as "compile", whichever work asked for it. While open, it listens to JAX's events.

    Attributes:
      seconds: by kind of work.

    Args:
      clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.seconds: Counter[str] = Counter()
        self._clock = clock
        self._last = clock()
        self._compiling = 0.0

    def spent_on(self, kind: str) -> None:
        """Counts the time since the last call, or since this was made, as work of this kind."""
        now = self._clock()
        elapsed = now - self._last
        compiling = min(self._compiling, elapsed)  # threads may compile side by side
        self.seconds["compile"] += compiling
        self.seconds[kind] += elapsed - compiling
        self._last, self._compiling = now, 0.0

    def _note(self, event: str, seconds: float, **_: object) -> None:
        if event.startswith(COMPILE_EVENTS):
            self._compiling += seconds

    def __enter__(self) -> WallTime:
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)
