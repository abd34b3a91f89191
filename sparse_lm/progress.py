"""Shows how far long work is: as a live bar on a terminal, as plain lines in a log."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar


class Progress:
    """Shows how much is done of a total, such as steps, and facts about it; `done` of it earlier processes did.

    On a terminal a live bar is drawn; to any other stream updates print lines, at least `line_seconds` apart.
    """

    def __init__(self, what: str, total: int, done: int = 0, *, stream: TextIO | None = None, line_seconds: float = 0):
        self._what, self._total = what, total
        self._stream = stream or sys.stdout
        self._line_seconds, self._line_time = line_seconds, time.monotonic() if line_seconds else float("-inf")
        self._bar = None
        if self._stream.isatty():
            facts = TextColumn("{task.description}", markup=False)
            columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), facts
            self._bar = Bar(*columns, console=Console(file=self._stream))
            self._task = self._bar.add_task("", total=total, completed=done)
            self._bar.start()

    def update(self, done: int, *facts: str) -> None:
        """Shows that `done` of the total is done, and `facts` beside it."""
        self.move(done, *facts)
        if not self._bar and time.monotonic() - self._line_time >= self._line_seconds:
            self._line_time = time.monotonic()
            self._print(" | ".join([f"{self._what} {done}/{self._total}", *facts]))

    def move(self, done: int, *facts: str) -> None:
        """Moves the bar; a log gets no line."""
        if self._bar:
            self._bar.update(self._task, completed=done, description=" | ".join(facts) if facts else None)

    def note(self, done: int, text: str) -> None:
        """Prints a line that stays, such as "step 5: saving"."""
        line = f"{self._what} {done}: {text}"
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            self._print(line)

    @contextlib.contextmanager
    def busy(self, done: int, what: str) -> Iterator[None]:
        """Says what is being done, and at the end how long it took."""
        start = time.monotonic()
        self.move(done, what)
        if not self._bar:
            self.note(done, what)
        yield
        self.note(done, f"{what}: {duration(time.monotonic() - start)}")

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar:
            self._bar.stop()

    def _print(self, line: str) -> None:
        try:
            print(line, file=self._stream, flush=True)
        except BrokenPipeError:  # the reader has ended, as tee does with Ctrl-C: the work goes on, and nobody is told
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


def duration(seconds: float) -> str:
    """Returns the two largest units, such as 1 d 02 h, 2 h 05 min, 3 min 20 s or 9 s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


def show_time_left(seconds: float | None) -> str:
    """Says how long work still takes; None is not known yet."""
    return f"{'-' if seconds is None else duration(seconds)} left"
