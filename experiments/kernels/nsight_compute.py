"""Hardware counters of chosen launches of a program, by Nsight Compute (ncu)."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import pathlib
import subprocess
from collections.abc import Iterator

# Of the peak over the whole launch, in percent.
_BUSY = {
    "tensor_pipe": "sm__pipe_tensor_cycles_active",
    "shared_memory": "l1tex__data_pipe_lsu_wavefronts",  # reads of 128 bytes, those of wgmma too
    "shared_memory_reads": "l1tex__data_bank_reads",
    "shared_memory_writes": "l1tex__data_bank_writes",
    "l1": "l1tex__throughput",
    "l2": "lts__throughput",
    "l2_to_sm": "lts__lts2xbar_cycles_active",
    "l2_sectors": "lts__t_sectors_srcunit_tex",
    "dram": "gpu__dram_throughput",
    "issue": "smsp__issue_active",
}
METRICS = {
    "nanoseconds": "gpu__time_duration.sum",
    "clock_hz": "sm__cycles_elapsed.avg.per_second",
    "cycles": "sm__cycles_elapsed.avg",
    "cycles_active": "sm__cycles_active.avg",
    "bytes_to_sm": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "bytes_from_dram": "dram__bytes_read.sum",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    **{f"{unit}_percent": f"{metric}.avg.pct_of_peak_sustained_elapsed" for unit, metric in _BUSY.items()},
}


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    """Profiles what is launched, and has ended, inside, if ncu runs this process; on the first GPU it sees."""
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    _check(driver.cuInit(0))
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    _check(driver.cuCtxSetCurrent(context))
    _check(driver.cuProfilerStart())
    try:
        yield
    finally:
        _check(driver.cuProfilerStop())


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver answered {status}")


def profile(program: list[str], report: pathlib.Path, kernels: str) -> None:
    """Runs a program and writes the metrics of its `profiled` launches as CSV.

    Args:
      program: command line.
      report: file to write; ncu's messages come first.
      kernels: regular expression found in the names of the kernels that are meant.

    Raises:
      CalledProcessError: the program, or ncu, failed.
    """
    options = {
        "profile-from-start": "off",
        "target-processes": "application-only",
        "kernel-name": f"regex:{kernels}",
        "metrics": ",".join(METRICS.values()),
        "clock-control": "none",
        "cache-control": "none",
        "csv": None,
        "page": "raw",
        "print-units": "base",
        "log-file": str(report),
    }
    arguments = [f"--{key}" if value is None else f"--{key}={value}" for key, value in options.items()]
    subprocess.run(["ncu", *arguments, *program], check=True)


def read_report(report: str) -> list[dict[str, str | float]]:
    """Reads the kernel's name and the metrics of each launch, in order; without those that this GPU or ncu lacks."""
    names, _units, *launches = csv.reader(line for line in report.splitlines() if line.startswith('"'))
    table = []
    for launch in launches:
        fields = dict(zip(names, launch, strict=True))
        row: dict[str, str | float] = dict(kernel=fields["Kernel Name"])
        for key, metric in METRICS.items():
            with contextlib.suppress(KeyError, ValueError):  # no such column; "" or "n/a" in it
                row[key] = float(fields[metric].replace(",", ""))
        table.append(row)
    return table


def version() -> str:
    """Returns the version of ncu."""
    return subprocess.run(["ncu", "--version"], check=True, capture_output=True, text=True).stdout.split("\n")[-2]
