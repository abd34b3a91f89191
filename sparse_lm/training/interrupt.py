"""SIGTERM and SIGINT as a request to save and stop, not as an end."""

from __future__ import annotations

import signal


class Interrupt:
    """While open, `requested` names the first of SIGTERM or SIGINT that arrived; a second one acts at once."""

    def __init__(self):
        self.requested: str | None = None

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        self.requested = signal.Signals(number).name
        signal.signal(number, self._before[number])
