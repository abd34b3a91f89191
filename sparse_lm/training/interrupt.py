"""Takes SIGTERM and SIGINT for a request to save and stop, not for an end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys


class Interrupt:
    """While open, answers the first SIGTERM or SIGINT with a line; a second one kills the process at once."""

    def __init__(self):
        self.requested: str | None = None  # the signal's name, once one has arrived

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        self.requested = signal.Signals(number).name
        for either in self._before:
            signal.signal(either, signal.SIG_DFL)  # Python's own handler of SIGINT would wait for compiling threads
        before = "\n" if sys.stderr.isatty() else ""  # a bar may stand in the line
        with contextlib.suppress(OSError):  # Ctrl-C ends a reader, such as tee, too
            # Not by print, which the signal may have interrupted.
            os.write(2, f"{before}{self.requested}: finishing the step under way, saving; again to stop now\n".encode())
