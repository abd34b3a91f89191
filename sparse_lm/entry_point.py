"""Runs the entry points: flags in, one call, and one line for whatever the user can put right.

It imports no JAX, which the processes of `prepare_data` do without.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable

from absl import app, flags
from absl import logging as absl_logging

from sparse_lm.errors import UserError
from sparse_lm.files import NO_URL

flags.disclaim_key_flags()  # a flag is one of the entry point that defines it, and so in its --help


def run(
    main: Callable[[], None],
    define_flags: Callable[[], None],
    parse_flags: Callable[[list[str]], list[str]] = app.parse_flags_with_usage,
    *,
    takes_less_memory: str = "",
) -> None:
    """Defines and parses flags, calls `main`, and exits; a `UserError` is one line, and so is a device's full memory.

    Args:
      main: reads its arguments from `flags.FLAGS`.
      define_flags: is not done on import: entry points have flags of the same names, and may be imported together.
      parse_flags: takes the command line and returns what of it is no flag.
      takes_less_memory: what the user is told to change if a device has too little.
    """

    def main_in_words(argv: list[str]) -> None:
        if len(argv) > 1:
            sys.exit(f"unknown argument {argv[1]!r}: flags begin with --, and patterns are quoted")
        configure_logs("quiet" in flags.FLAGS and flags.FLAGS.quiet)
        for name in ("workdir", "output", "data", "files", "heldout_files", "tokenizer", "tfds"):
            given = flags.FLAGS[name].value if name in flags.FLAGS else None
            for path in [given] if isinstance(given, str) else given or ():
                if not path:
                    sys.exit(f"--{name}=: must not be empty")
                if "://" in path:
                    sys.exit(f"--{name}={path}: {NO_URL}")
        try:
            main()
        except UserError as error:
            sys.exit(str(error))
        except KeyboardInterrupt:
            sys.exit("interrupted")
        except RuntimeError as error:  # JAX's, which is not imported here
            said = str(error).partition("\n")[0]
            if not (takes_less_memory and said.startswith("RESOURCE_EXHAUSTED") and "memory" in said):
                raise
            sys.exit(f"{said.rstrip('.')}: what takes less is {takes_less_memory}")

    define_flags()
    app.run(main_in_words, flags_parser=parse_flags)


def configure_logs(quiet: bool = False) -> None:
    """Sets up logging, once flags are parsed: this library's information, unless `quiet`, and all warnings."""
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
        return getattr(sys.stderr, name)


def _is_worth_reading(record: logging.LogRecord) -> bool:
    """Drops the tracebacks of a save that failed: `Checkpoints` says it in one line."""
    return not (record.exc_info and "/orbax/" in record.pathname)


def _unraisable(unraisable: object) -> None:
    """Passes over what TensorStore's callbacks meet after a failed save: the loop that they report to is gone."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def define_run_flags() -> None:
    """Defines --workdir and --checkpoint."""
    flags.DEFINE_string("workdir", None, "Directory of the run.", required=True)
    flags.DEFINE_string("checkpoint", "latest", "latest, best (by held-out loss) or a step.")
    known = re.compile(r"latest|best|\d+").fullmatch
    flags.register_validator("checkpoint", lambda name: bool(known(name)), "must be latest, best or a step")
