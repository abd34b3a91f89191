"""Tells which unit of the GPU limits each product: hardware counters, read by Nsight Compute.

Needs permission to read them, and leaves the clocks as they are.

    python -m experiments.kernels.counters --output=experiments/results/kernel_counters_h200.json
"""

from __future__ import annotations

import itertools
import json
import pathlib
import statistics
import sys
import tempfile

from absl import app, flags

from experiments.kernels import nsight_compute
from experiments.result_files import write_results

OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)
REPORTS = flags.DEFINE_string("reports", None, "Directory to keep what the profiler writes.")

_OURS_OR_CUBLAS = "mosaic_gpu|nvjet|gemm|cutlass"
# Each program with a pattern of the kernels that are its products: one a call.
PROGRAMS = {
    "launch_products --kind=24": _OURS_OR_CUBLAS,
    "launch_cusparselt": ".",
    "launch_products --kind=venom": _OURS_OR_CUBLAS,
    "launch_products --kind=slices": _OURS_OR_CUBLAS,
}


def tabulate(launched: list[dict], profiles: list[dict]) -> list[dict]:
    """Returns for each run of launches of one product the median of each counter.

    Raises:
      ValueError: other kernels were profiled than were launched.
    """
    if len(launched) != len(profiles):
        kernels = [profile["kernel"] for profile in profiles]
        raise ValueError(f"{len(launched)} launches, but {len(profiles)} profiles: {kernels}")
    table = []
    for label, group in itertools.groupby(zip(launched, profiles, strict=True), key=lambda pair: pair[0]):
        rows = [profile for _, profile in group]
        medians = {key: statistics.median(row[key] for row in rows) for key in rows[0] if key != "kernel"}
        table.append({**label, "kernel": rows[0]["kernel"], "launches": len(rows), **medians})
    return table


def main(_) -> None:
    reports = pathlib.Path(REPORTS.value or tempfile.mkdtemp())
    reports.mkdir(parents=True, exist_ok=True)
    table = []
    for number, (program, kernels) in enumerate(PROGRAMS.items()):
        report, launched = reports / f"{number}.csv", reports / f"{number}.json"
        command = [sys.executable, "-m", *f"experiments.kernels.{program}".split(), f"--launched={launched}"]
        nsight_compute.profile(command, report, kernels)
        rows = tabulate(json.loads(launched.read_text()), nsight_compute.read_report(report.read_text()))
        for row in rows:
            print({k: round(value, 2) if isinstance(value, float) else value for k, value in row.items()}, flush=True)
        table += rows
        write_results(OUTPUT.value, dict(nsight_compute=nsight_compute.version(), products=table))


if __name__ == "__main__":
    app.run(main)
