"""Keeps an unfinished preparation in a hidden folder beside the directory that it will become."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from sparse_lm.data.corpus import Corpus
from sparse_lm.data.workers import Result, Task, Workers
from sparse_lm.durations import duration
from sparse_lm.progress import Progress, show_time_left

_log = logging.getLogger(__name__)

LOCK_FILE = "lock"
LINE_SECONDS = 10
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # what file systems of clusters say that have none


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Names the results of tasks in a folder, which belongs to this process alone, and has `workers` run them."""

    folder: Path
    workers: Workers

    def path(self, kind: str, *deciding: object) -> Path:
        """Returns the file for a result: its name has a hash of whatever decides the result, other results by name."""
        words = [item.name if isinstance(item, Path) else str(item) for item in deciding]
        key = hashlib.sha256(json.dumps([kind, *words]).encode()).hexdigest()[:32]
        return self.folder / kind / f"{key}.json"

    def tasks(self, kind: str, function: Callable[..., Result], corpus: Corpus, *arguments: object) -> dict[Path, Task]:
        """Returns a task for each part of a corpus: `function` with that part and `arguments`, which decide, too."""
        return {
            self.path(kind, part.stamp(), *arguments): functools.partial(function, part, *arguments)
            for part in corpus.parts()
        }

    def run(self, what: str, unit: str, tasks: Mapping[Path, Task], total: int) -> dict[Path, Result]:
        """Runs the tasks and returns their results, while it shows that `what` is done to `total` of `unit`."""
        tally = Tally(what, unit, total)
        try:
            results = self.workers.run(tasks, tally)
        finally:
            tally.progress.close()
        tally.log()
        return results


class Tally:
    """Adds up what tasks report, how many more of `unit`, documents, tokens and bytes, and shows it.

    What an earlier run saved counts as done, but not for the speed.
    """

    def __init__(self, what: str, unit: str, total: int):
        self.progress = Progress(f"{what}, {unit}", total, stream=sys.stderr, line_seconds=LINE_SECONDS)
        self._what, self._unit, self._total = what, unit, total
        self._saved = 0
        self._fresh: collections.Counter[str] = collections.Counter()
        self._start = time.monotonic()

    def __call__(self, report: Result) -> None:
        self._saved += report.get("saved", {}).get(self._unit, 0)
        self._fresh.update({key: report.get(key, 0) for key in {self._unit, "documents", "tokens", "bytes"}})
        seconds, fresh = time.monotonic() - self._start, self._fresh[self._unit]
        done = self._saved + fresh
        left = (self._total - done) * seconds / fresh if fresh else None
        self.progress.update(done, *self._facts(seconds), show_time_left(left))

    def log(self) -> None:
        """Logs the speed of the whole, where there was one worth knowing."""
        seconds = time.monotonic() - self._start
        if self._fresh["tokens"] or seconds > LINE_SECONDS:
            _log.info("%s", ", ".join([f"{self._what}: done in {duration(seconds)}", *self._facts(seconds)]))

    def _facts(self, seconds: float) -> list[str]:
        documents, tokens, size = (self._fresh[key] for key in ("documents", "tokens", "bytes"))
        facts = [f"{documents:,} documents"] if documents and self._unit != "documents" else []
        facts += [f"{tokens / seconds / 1e6:,.2f} M tokens/s"] if tokens else []
        return [*facts, f"{size / tokens:.2f} bytes a token"] if size and tokens else facts


@contextlib.contextmanager
def open_workspace(directory: Path, workers: Workers) -> Iterator[Workspace]:
    """Opens the workspace of `directory`, with what an earlier run left in it, and removes it when its work is done.

    A second process waits until the first one has left. An exception, like a kill, leaves the folder for the next run.

    Raises:
      OSError: the folder beside `directory` cannot be written.
    """
    folder = directory.parent / f".{directory.name}.incomplete"
    done = directory.parent / f".{directory.name}.incomplete-done"
    with _lock(folder), workers:
        shutil.rmtree(done, ignore_errors=True)  # of a run that was killed while it removed this
        for partial in folder.rglob("*.part"):
            partial.unlink()
        yield Workspace(folder, workers)
        folder.rename(done)  # at once: a folder that is half removed must not be taken for work to go on from
        shutil.rmtree(done, ignore_errors=True)  # the next process may be removing it, too


def _lock(folder: Path) -> TextIO:
    """Makes the folder and locks it, until the file is closed or the process ends."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = open(folder / LOCK_FILE, "w")  # noqa: SIM115 (the caller closes it)
        except FileNotFoundError:
            continue  # the folder was removed just now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for another process, which prepares data in %s", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            _log.warning("no locks in %s: let no other process prepare the same data meanwhile", folder)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat((folder / LOCK_FILE).stat(), os.fstat(lock.fileno())):
                return lock
        lock.close()  # who held it has finished, and removed the folder
