"""A lock that keeps other runs out of a workdir while one trains in it.

It is flock(2) on `<workdir>/.lock`, which the system releases when the process ends, however it ends. Linux passes
such locks on to an NFS server, so that they hold between hosts. A file system without locks gives a warning.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from sparse_lm.training.mesh import processes
from sparse_lm.training.workdir import WorkdirError, writing

FILE = ".lock"

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
            holder = _take(file)
        if processes.any_of(holder is not None):
            raise WorkdirError(workdir, f"{holder or 'another process'} trains in it; use another --workdir, or wait")
        yield


def _take(file: TextIO) -> str | None:
    """Takes the lock and writes who holds it; returns who does if that is another process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return file.read() or "another process"
    except OSError as error:
        _log.warning("%s cannot be locked (%s): let no other run train there meanwhile", file.name, error.strerror)
        return None
    file.truncate(0)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    file.write(f"process {os.getpid()} on {socket.gethostname()} (since {now})")
    file.flush()
    return None
