"""Progress of long work, as lines in a log: how much is done, how fast, and how long it still takes."""

from __future__ import annotations

import logging
import time
from typing import Any

from sparse_lm.durations import duration

_log = logging.getLogger(__name__)

REPORT_SECONDS = 10


class Progress:
    """Adds up what tasks report, and logs a line every `REPORT_SECONDS` and at the end.

    A report has some of `unit` (how many more of what is counted), `tokens` and `bytes`. What an earlier
    run saved counts as done, but not for the speed.
    """

    def __init__(self, what: str, unit: str, total: int):
        """`what` is done to `total` of `unit`, a key of the reports and of saved results."""
        self._what, self._unit, self._total = what, unit, total
        self._saved = 0
        self._done = dict.fromkeys((unit, "tokens", "bytes"), 0)
        self._start = self._logged = time.monotonic()

    def __call__(self, report: dict[str, Any]) -> None:
        if "saved" in report:
            self._saved += report["saved"][self._unit]
            return
        for key in self._done:
            self._done[key] += report.get(key, 0)
        now = time.monotonic()
        if now - self._logged > REPORT_SECONDS:
            self._logged = now
            _log.info("%s", self.line(now - self._start))

    def finish(self) -> None:
        """Logs the speed of the whole, where there was one worth knowing."""
        seconds = time.monotonic() - self._start
        if self._done["tokens"] or seconds > REPORT_SECONDS:
            _log.info("%s", ", ".join([f"{self._what}: done in {duration(seconds)}", *self._rates(seconds)]))

    def line(self, seconds: float) -> str:
        """What to say after so many seconds of work."""
        done = self._saved + self._done[self._unit]
        parts = [f"{self._what}: {done / self._total:.1%}", *self._rates(seconds)]
        if fresh := self._done[self._unit]:
            parts.append(f"{duration((self._total - done) * seconds / fresh)} left")
        return ", ".join(parts)

    def _rates(self, seconds: float) -> list[str]:
        tokens, size = self._done["tokens"], self._done["bytes"]
        rates = [f"{tokens / seconds / 1e6:,.2f} M tokens/s"] if tokens else []
        return [*rates, f"{size / tokens:.2f} bytes a token"] if size else rates
