"""Tasks on several processes, whose results are files: what is finished survives a kill.

A task writes its result when it is complete, under a name that only the same task has. A later run
of the same tasks reads that file instead of doing the work again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from sparse_lm.data.errors import DataError
from sparse_lm.files import replacing

Report = Callable[[dict[str, Any]], None]


class Task(Protocol):
    """A picklable piece of work.

    Attributes:
      path: file of the result. Its name holds whatever decides the result.
    """

    path: Path

    def run(self, report: Report) -> dict[str, Any]:
        """Does the work.

        Args:
          report: takes what was done since the last call, for those who watch.

        Returns:
          The result, as JSON can hold it.
        """


def save_json(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` to `path`, all of it or nothing."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(value))


def available_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux: fewer in a container or under taskset than the machine has
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """Processes that run tasks; without more than one to run at a time, this process does.

    They are started when they are first needed, afresh rather than by a fork: the caller may hold
    threads and a GPU. They end with this object, and when the process that started them is killed.
    """

    def __init__(self, processes: int, threads: int = 1):
        """At most so many `processes`, with so many threads in the tokenizer of each."""
        self._processes, self._threads = processes, threads
        self._workers: list[_Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.stop()

    def run(self, tasks: Sequence[Task], report: Report) -> list[dict[str, Any]]:
        """Results of the tasks, in their order; those that are on disk already are read.

        Args:
          tasks: what to do.
          report: called in this process with what the tasks report, and with {"saved": result} for a
            result that was on disk.

        Raises:
          DataError: a process died.
          Exception: what a task raised.
        """
        results: dict[int, dict[str, Any]] = {}
        missing = []
        for index, task in enumerate(tasks):
            if task.path.exists():
                results[index] = json.loads(task.path.read_text())
                report({"saved": results[index]})
            else:
                missing.append(index)
        if min(self._processes, len(missing)) > 1:
            while len(self._workers) < min(self._processes, len(missing)):
                self._workers.append(_Worker(self._threads))
            results |= self._distribute(tasks, missing, report)
        else:
            results |= {index: _complete(tasks[index], report) for index in missing}
        return [results[index] for index in range(len(tasks))]

    def _distribute(self, tasks: Sequence[Task], indices: list[int], report: Report) -> dict[int, dict[str, Any]]:
        waiting = iter(indices)
        busy: dict[Connection, tuple[_Worker, int]] = {}
        results: dict[int, dict[str, Any]] = {}

        def employ(worker: _Worker) -> None:
            if (index := next(waiting, None)) is not None:
                worker.connection.send(tasks[index])
                busy[worker.connection] = worker, index

        for worker in self._workers:
            employ(worker)
        while busy:
            for connection in wait(list(busy)):
                worker, index = busy[connection]
                kind, value = worker.receive()
                if kind == "report":
                    report(value)
                elif kind == "error":
                    raise value
                else:
                    results[index] = value
                    del busy[connection]
                    employ(worker)
        return results


class _Worker:
    def __init__(self, threads: int):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, threads), daemon=True)
        self._process.start()
        theirs.close()  # or the end of the process would not show

    def receive(self) -> tuple[str, Any]:
        try:
            return self.connection.recv()
        except EOFError:
            self._process.join()
            reason = f"a process ended with exit code {self._process.exitcode}"
            raise DataError(f"{reason}: if memory ran out, use fewer with --processes") from None

    def stop(self) -> None:
        self._process.kill()  # nothing is lost: files appear complete or not at all
        self._process.join()
        self.connection.close()


def _work(connection: Connection, threads: int) -> None:
    """What a worker process does: one task after the other, until it is ended."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that started this ends it
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # read by the tokenizers library when it first runs
    while True:
        task = connection.recv()
        try:
            message = "result", _complete(task, lambda value: connection.send(("report", value)))
        except Exception as error:
            error.add_note(traceback.format_exc())  # where it happened: that does not travel with an exception
            message = "error", error
        connection.send(message)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _complete(task: Task, report: Report) -> dict[str, Any]:
    result = task.run(report)
    save_json(task.path, result)
    return result
