"""Progress of a run: a live bar on a terminal, one plain line a report in a log."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from sparse_lm.durations import duration


class Progress:
    """Shows step, phase, loss, speed and time left.

    Args:
      steps: of the whole run.
      start_step: steps done by earlier processes.
      stream: standard output if not given. On a terminal a live bar is drawn; elsewhere each
        update prints a line.
    """

    def __init__(self, steps: int, start_step: int = 0, stream: TextIO | None = None):
        self._steps = steps
        self._stream = stream or sys.stdout
        self._bar = _open_bar(self._stream) if self._stream.isatty() else None
        if self._bar:
            self._task = self._bar.add_task("", total=steps, completed=start_step)
            self._bar.start()

    def update(
        self, step: int, *, phase: str, loss: float, tokens_per_second: float | None, seconds_left: float | None
    ) -> None:
        """Reports a run of which `step` steps are done; None for what is not known yet."""
        left = "-" if seconds_left is None else duration(seconds_left)
        text = " | ".join([phase, f"loss {loss:.4f}", _speed(tokens_per_second), f"{left} left"])
        if self._bar:
            self._bar.update(self._task, completed=step, description=text, refresh=True)
        else:
            print(f"step {step}/{self._steps} | {text}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()


def _open_bar(stream: TextIO) -> Bar:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    return Bar(*columns, console=Console(file=stream), auto_refresh=False)


def _speed(tokens_per_second: float | None) -> str:
    return "- tokens/s" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"
