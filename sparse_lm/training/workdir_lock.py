"""A lock on `<workdir>/.lock` that keeps other runs out of a workdir while one trains in it."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from sparse_lm.errors import WorkdirError
from sparse_lm.files import try_lock
from sparse_lm.training.mesh import processes
from sparse_lm.training.workdir import writing

FILE = ".lock"


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
            if try_lock(file):
                file.truncate(0)
                now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                file.write(f"process {os.getpid()} on {socket.gethostname()} (since {now})")
                file.flush()
            else:
                file.seek(0)
                holder = file.read() or "another process"
        if processes.any_of(holder is not None):
            raise WorkdirError(workdir, f"{holder or 'another process'} trains in it; use another --workdir, or wait")
        yield
