"""Where an unfinished preparation is kept: a hidden folder beside the directory that it will become."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from sparse_lm.data.progress import Progress
from sparse_lm.data.tasks import Task, Workers

_log = logging.getLogger(__name__)

LOCK_FILE = "lock"
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # what file systems of clusters say that have none


@dataclasses.dataclass(frozen=True)
class Workspace:
    """A folder for the results of tasks, and the processes that run them.

    Attributes:
      folder: belongs to this process alone.
      workers: run the tasks.
    """

    folder: Path
    workers: Workers

    def path(self, kind: str, *deciding: object) -> Path:
        """The file for a result: its name has a hash of whatever decides the result."""
        key = hashlib.sha256(json.dumps([kind, *map(str, deciding)]).encode()).hexdigest()[:32]
        return self.folder / kind / f"{key}.json"

    def forget(self, kind: str) -> None:
        """Drops the results of one kind."""
        shutil.rmtree(self.folder / kind, ignore_errors=True)

    def run(self, what: str, tasks: Sequence[Task], unit: str, total: int) -> list[dict[str, Any]]:
        """Results of the tasks, logging progress: `what` is done to `total` of `unit`."""
        progress = Progress(what, unit, total)
        results = self.workers.run(tasks, progress)
        progress.finish()
        return results


@contextlib.contextmanager
def open_workspace(directory: Path, workers: Workers) -> Iterator[Workspace]:
    """The workspace of `directory`, with what an earlier run left in it; gone when the work in it is done.

    A second process waits until the first one has left. An exception, like a kill, leaves the folder
    for the next run.

    Args:
      directory: what is being prepared.
      workers: processes that run the tasks, ended at last.

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
    """The folder's lock, held until the file is closed or the process ends."""
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
        if _is_open_file(folder / LOCK_FILE, lock):
            return lock
        lock.close()  # who held it has finished, and removed the folder


def _is_open_file(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
