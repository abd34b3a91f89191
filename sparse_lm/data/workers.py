"""Runs tasks on several processes."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from sparse_lm.errors import DataError
from sparse_lm.progress import Progress, duration, show_time_left

_log = logging.getLogger(__name__)

LINE_SECONDS = 10


def available_cores() -> int:
    """Counts the cores that this process may use: in a container or under taskset fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers(contextlib.AbstractContextManager):
    """Runs tasks on at most `processes` processes, whose tokenizers take `threads` threads each; if one, on this one.

    The processes are started when they are first needed, afresh rather than by a fork, since the caller may hold
    threads and a GPU. They end with this object, whatever they are doing, and when this process is killed.
    """

    def __init__(self, processes: int, threads: int):
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, context, _begin, (threads,)) if processes > 1 else None

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._pool is None:
            return
        if kind:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
        self._pool.shutdown()

    def map(self, what: str, function: Callable, tasks: Sequence[tuple]) -> Iterator[Any]:
        """Yields the results of a picklable `function(*task)` in the order of the tasks, and shows how far that is.

        Raises:
          DataError: a process died.
          Exception: what `function` raised.
        """
        start = time.monotonic()
        progress = Progress(f"{what}, parts", len(tasks), stream=sys.stderr, line_seconds=LINE_SECONDS)
        with contextlib.closing(progress):
            try:
                run = self._results(function, tasks) if self._pool else itertools.starmap(function, tasks)
                for done, result in enumerate(run, 1):
                    progress.update(done, show_time_left((len(tasks) / done - 1) * (time.monotonic() - start)))
                    yield result
            except BrokenProcessPool as error:
                raise DataError("a process was killed: if memory ran out, use fewer with --processes") from error
        _log.info("%s: done in %s", what, duration(time.monotonic() - start))

    def _results(self, function: Callable, tasks: Sequence[tuple]) -> Iterator[Any]:
        """Yields what `ProcessPoolExecutor.map` would, which cancels tasks when it is left.

        A pool of Python 3.11 that then finds its processes killed prints a traceback.
        """
        futures = collections.deque(self._pool.submit(function, *task) for task in tasks)
        while futures:
            yield futures.popleft().result()


def _begin(threads: int) -> None:
    """Prepares a process that was just started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that started this answers it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # read by the tokenizers library when it first runs


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
