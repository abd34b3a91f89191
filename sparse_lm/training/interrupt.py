"""SIGTERM and SIGINT as a request to save and stop, not as an end."""

from __future__ import annotations

import concurrent.futures
import signal
import threading
from collections.abc import Callable

_POLL_SECONDS = 0.1


class Interrupt:
    """While open, `requested` names the first of SIGTERM or SIGINT that arrived; a second one acts at once."""

    def __init__(self):
        self.requested: str | None = None

    def wait_for(self, work: Callable[[], object]) -> bool:
        """Does work that cannot be stopped, such as a compilation; what it raises is raised here.

        Returns:
          Whether it is done. If not, a signal came first, and the work goes on in a thread that nobody waits for.
        """
        future: concurrent.futures.Future = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not self.requested:
            done, _ = concurrent.futures.wait([future], _POLL_SECONDS)
            if done:
                future.result()
                return True
        return False

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        self.requested = signal.Signals(number).name
        for either, handler in self._before.items():
            signal.signal(either, handler)
