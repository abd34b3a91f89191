"""Takes SIGTERM and SIGINT for a request to save and stop, not for an end."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import sys
import threading
from collections.abc import Callable

_POLL_SECONDS = 0.1


class Interrupt:
    """While open, answers the first SIGTERM or SIGINT with a line; a second one acts at once."""

    def __init__(self):
        self.requested: str | None = None  # the signal's name, once one has arrived
        self.answer = "stopping"  # what the process does then, for the line

    def wait_for(self, *works: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Does works that cannot be stopped, such as compilations, in a thread each; what one raises is raised here.

        `meanwhile` is called every tenth of a second. Returns True if all are done. If not, a signal came first, and
        they go on in threads that nobody waits for.
        """
        futures = [_in_thread(work) for work in works]
        while not self.requested:
            done, waiting = concurrent.futures.wait(futures, _POLL_SECONDS)
            for future in done:
                future.result()
            if not waiting:
                return True
            meanwhile()
        return False

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        self.requested = signal.Signals(number).name
        before = "\n" if sys.stderr.isatty() else ""  # a bar may stand in the line
        # Not by print, which the signal may have interrupted.
        os.write(2, f"{before}{self.requested}: {self.answer}; again to stop now\n".encode())
        for either, handler in self._before.items():
            signal.signal(either, handler)


def _in_thread(work: Callable[[], object]) -> concurrent.futures.Future:
    """Starts work in a thread that no end of the process waits for, as it would for those of an executor."""
    future: concurrent.futures.Future = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
