"""Reports training runs: loss, throughput, utilisation and more by tokens and by time, and what differs between runs.

    python -m sparse_lm.report --workdir=runs/tiny [--workdir=runs/dense ...] [--output=report.html]

The output is one page to explore that needs no other file. Runs may still be training, or have been stopped or resumed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from sparse_lm import entry_point
from sparse_lm.errors import OutputError
from sparse_lm.files import replacing, writing
from sparse_lm.reporting.page import page
from sparse_lm.reporting.run import read_runs


def report(workdirs: Sequence[str], output: str) -> Path:
    """Writes the report of these workdirs' runs. The directory of `output` is made if need be.

    Raises what `read_runs` does, and OutputError if `output` ends in something else, or cannot be written.
    """
    path = Path(output)
    if path.suffix != ".html":
        raise OutputError(output, "must end in .html")
    text = page(read_runs(workdirs))
    with writing(OutputError, output), replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return path


def main() -> None:
    path = report(flags.FLAGS.workdir, flags.FLAGS.output)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def _define_flags() -> None:
    flags.DEFINE_multi_string("workdir", None, "Directory of a run; may be given several times.", required=True)
    flags.DEFINE_string("output", "report.html", "Where to write: a file that ends in .html.")


cli = functools.partial(entry_point.run, main, _define_flags)

if __name__ == "__main__":
    cli()
