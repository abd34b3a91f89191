"""Sets up what the entry points log: this library's information, other libraries' warnings only."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from absl import logging as absl_logging


def configure(quiet: bool = False) -> None:
    """Sets up logging for an entry point's process, once flags are parsed; `quiet` leaves warnings and errors."""
    absl_logging.set_verbosity(absl_logging.WARNING)  # Orbax logs tens of lines a checkpoint at INFO
    handler = absl_logging.get_absl_handler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.python_handler.addFilter(_is_worth_reading)
    handler.python_handler.stream = _StandardError()
    for name in ("sparse_lm", "__main__"):  # the second is the entry point itself
        logging.getLogger(name).setLevel(logging.WARNING if quiet else logging.INFO)
    sys.unraisablehook = _unraisable


class _StandardError:
    """Writes to the standard error of the moment, which a live bar takes over to keep its own line whole."""

    def __getattr__(self, name: str) -> object:
        stream: TextIO = sys.stderr
        return getattr(stream, name)


def _is_worth_reading(record: logging.LogRecord) -> bool:
    """Drops the tracebacks of a save that failed: `Checkpoints` says it in one line."""
    return not (record.exc_info and "/orbax/" in record.pathname)


def _unraisable(unraisable: object) -> None:
    """Passes over what TensorStore's callbacks meet after a failed save: the loop that they report to is gone."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
