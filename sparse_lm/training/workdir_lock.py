"""A lock that keeps other runs out of a workdir while one trains in it.

It is flock(2) on `<workdir>/.lock`, which the system releases when the process ends, however it ends. Linux passes
such locks on to an NFS server, so that they hold between hosts. A file system without locks gives a warning.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from sparse_lm.training.mesh import processes
from sparse_lm.training.workdir import WorkdirError, writing

FILE = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # answers of file systems that have none

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def workdir_lock(workdir: str | os.PathLike) -> Iterator[None]:
    """Holds the lock of an existing workdir. The leader of several processes holds it for all of them.

    Raises:
      WorkdirError: another run holds it. The message names its host and process.
    """
    with contextlib.ExitStack() as held:
        holder = None
        if processes.is_leader():
            with writing(workdir):
                file = held.enter_context(open(Path(workdir, FILE), "a+", encoding="utf-8"))
            holder = _take(file, workdir)
        if processes.any_of(holder is not None):
            raise WorkdirError(workdir, f"{holder or 'another process'} trains in it; use another --workdir, or wait")
        try:
            yield
        finally:
            if processes.is_leader():
                file.truncate(0)  # only a killed process leaves its name


def _take(file: TextIO, workdir: str | os.PathLike) -> str | None:
    """Takes the lock and writes who holds it; returns who does if that is another process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(file) or "another process"
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _log.warning("no locks in %s: let no other run train in it meanwhile", workdir)
        return None
    if before := _read_holder(file):
        _log.warning("%s: %s has ended without giving up its lock, which is taken over", workdir, before)
    file.truncate(0)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    json.dump({"host": socket.gethostname(), "process": os.getpid(), "since": now}, file)
    file.flush()
    return None


def _read_holder(file: TextIO) -> str | None:
    """Returns what the file says of who holds the lock, if it says anything."""
    file.seek(0)
    try:
        holder = json.load(file)
        return f"process {holder['process']} on {holder['host']} (since {holder['since']})"
    except (ValueError, TypeError, KeyError):
        return None
