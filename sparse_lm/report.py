"""Reports training runs: loss, throughput, utilisation and more by tokens and by time, and what differs between runs.

    python -m sparse_lm.report --workdir=runs/tiny [--workdir=runs/dense ...] [--output=report.html]

An .html output is one page to explore that needs no other file; a .png output is a picture of the main curves. Runs
may still be training, or have been stopped or resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from absl import flags

from sparse_lm import entry_point
from sparse_lm.reporting.figure import STYLE, draw
from sparse_lm.reporting.page import page
from sparse_lm.reporting.run import read_runs

PNG_DPI = 150


class OutputError(ValueError):
    """An output that cannot be written."""


def report(workdirs: Sequence[str], output: str) -> Path:
    """Writes the report of these workdirs' runs.

    Args:
      workdirs: one or more.
      output: a path that ends in .html or .png; its directory is made if need be.

    Raises:
      WorkdirError: one of them holds no run, or none that has logged a step yet.
      OutputError: `output` ends in something else, or cannot be written.
    """
    path = Path(output)
    if path.suffix not in (".html", ".png"):
        raise OutputError(f"--output={output}: must end in .html or .png")
    runs = read_runs(workdirs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".html":
            path.write_text(page(runs), encoding="utf-8")
        else:
            with mpl.rc_context(STYLE):
                draw(runs).savefig(path, dpi=PNG_DPI)
    except OSError as error:
        raise OutputError(f"--output={output}: cannot be written: {error.strerror}") from error
    return path


def main() -> None:
    path = report(flags.FLAGS.workdir, flags.FLAGS.output)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def _define_flags() -> None:
    flags.DEFINE_multi_string("workdir", None, "Directory of a run; may be given several times.", required=True)
    flags.DEFINE_string("output", "report.html", "Where to write: a file that ends in .html or .png.")


def cli() -> None:
    """Runs the command line."""
    entry_point.run(main, _define_flags, (OutputError,))


if __name__ == "__main__":
    cli()
