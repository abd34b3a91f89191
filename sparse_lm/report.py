"""Draws training runs: loss by tokens and by time, throughput, where the time went, activation sparsity by layer.

    python -m sparse_lm.report --workdir=runs/tiny [--workdir=runs/dense ...] [--output=report.html]

An .html output is one page that needs no other file; a .png output is its figure. Runs may still be
training, or have been stopped or resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.style
from absl import flags

from sparse_lm import entry_point
from sparse_lm.reporting.figure import draw, run_styles, style
from sparse_lm.reporting.page import page
from sparse_lm.reporting.run import read_runs

PNG_DPI = 150


def report(workdirs: Sequence[str], output: str) -> Path:
    """Writes the report of these workdirs' runs.

    Args:
      workdirs: one or more.
      output: a path that ends in .html or .png; its directory is made if need be.

    Raises:
      WorkdirError: one of them holds no run, or none that has logged a step yet.
      ValueError: `output` ends in something else.
    """
    path = Path(output)
    if path.suffix not in (".html", ".png"):
        raise ValueError(f"--output={output}: must end in .html or .png")
    runs = read_runs(workdirs)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.style.context(style()):
        figure = draw(runs)
        if path.suffix == ".png":
            figure.savefig(path, dpi=PNG_DPI)
        else:
            colors = [f"#{run['color'].removeprefix('#')}" for run in run_styles(len(runs))]
            path.write_text(page(runs, figure, colors), encoding="utf-8")
    return path


def main() -> None:
    path = report(flags.FLAGS.workdir, flags.FLAGS.output)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} KB")


def _define_flags() -> None:
    flags.DEFINE_multi_string("workdir", None, "Directory of a run; may be given several times.", required=True)
    flags.DEFINE_string("output", "report.html", "Where to write: a file that ends in .html or .png.")


if __name__ == "__main__":
    entry_point.run(main, _define_flags, (ValueError, OSError))
