"""Tasks on several processes, whose results are files: what is finished survives a kill.

A task writes its result when it is complete, under a name that only the same task has. A later run of the same tasks
reads that file instead of doing the work again.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from sparse_lm.data.errors import DataError
from sparse_lm.files import write_json

Result = dict[str, Any]  # as JSON can hold it
Report = Callable[[Result], None]  # takes what was done since the last call, or {"saved": a result of an earlier run}
Task = Callable[[Path, Report], Result]  # takes the file of its result, beside which it may write others; picklable

REPORT_SECONDS = 0.2  # between looks at what other processes report


def available_cores() -> int:
    """Counts the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux: fewer in a container or under taskset than the machine has
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """Runs tasks on several processes; where not more than one would run at a time, on this one.

    The processes are started when they are first needed, afresh rather than by a fork, since the caller may hold
    threads and a GPU. They end with this object, whatever they are doing, and when this process is killed.

    Args:
      processes: how many at most.
      threads: how many the tokenizer of each process takes.
    """

    def __init__(self, processes: int, threads: int = 1):
        self._processes, self._threads = processes, threads
        self._exit = contextlib.ExitStack()
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        self._exit.close()

    def run(self, tasks: Mapping[Path, Task], report: Report) -> dict[Path, Result]:
        """Returns the results of the tasks, by the files that they are in; those that are on disk already are read.

        Args:
          tasks: what to do for each file, whose name holds whatever decides the result.
          report: called in this process with what the tasks report, and with {"saved": result} for a result that
            was on disk.

        Raises:
          DataError: a process died.
          Exception: what a task raised.
        """
        results = {path: json.loads(path.read_text()) for path in tasks if path.exists()}
        for result in results.values():
            report({"saved": result})
        missing = {path: task for path, task in tasks.items() if path not in results}
        if min(self._processes, len(missing)) > 1:
            return results | self._distribute(missing, report)
        return results | {path: _complete(path, task, report) for path, task in missing.items()}

    def _distribute(self, tasks: Mapping[Path, Task], report: Report) -> dict[Path, Result]:
        self._pool = self._pool or self._start()
        # Ctrl-C reaches all processes, of which this one alone shall answer it. Those started here inherit the mask.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = {path: self._pool.submit(_complete, path, task) for path, task in tasks.items()}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        waiting = set(futures.values())
        try:
            while waiting:
                done, waiting = wait(waiting, REPORT_SECONDS, FIRST_COMPLETED)
                while not self._reports.empty():
                    report(self._reports.get())
                for future in done:
                    future.result()  # raises what the task raised
        except BrokenProcessPool as error:
            raise DataError("a process was killed: if memory ran out, use fewer with --processes") from error
        return {path: future.result() for path, future in futures.items()}

    def _start(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        self._reports = context.SimpleQueue()
        ended, lifeline = context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(self._processes, context, _begin, (self._reports, ended, self._threads))
        self._exit.callback(pool.shutdown, cancel_futures=True)
        self._exit.callback(lifeline.close)  # first: nothing is lost, as files appear complete or not at all
        return pool


_reports: SimpleQueue | None = None  # of a process that was started to run tasks


def _begin(reports: SimpleQueue, ended: Connection, threads: int) -> None:
    """Prepares a process that was just started."""
    global _reports
    _reports = reports
    threading.Thread(target=_end_with, args=(ended,), daemon=True).start()
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # read by the tokenizers library when it first runs


def _end_with(ended: Connection) -> None:
    """Ends this process when the other end of the connection is closed, if only by the kill of who holds it."""
    with contextlib.suppress(EOFError):
        ended.recv()
    os._exit(1)


def _complete(path: Path, task: Task, report: Report | None = None) -> Result:
    """Runs a task and keeps its result; without `report` in a process that was started for it."""
    result = task(path, report or _reports.put)
    write_json(path, result)
    return result
