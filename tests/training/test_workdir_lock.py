"""One run at a time trains in a workdir."""

import fcntl
import os
import signal
import socket
import subprocess
import sys

import pytest

from sparse_lm.errors import WorkdirError
from sparse_lm.training.workdir_lock import FILE, workdir_lock
from tests.command_lines import ROOT

HOLD = """
import sys, time
from sparse_lm.training.workdir_lock import workdir_lock

with workdir_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other(tmp_path):
    """A process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_second_process_is_refused_and_a_killed_ones_lock_is_taken_over(tmp_path, other):
    holder = rf"process {other.pid} on {socket.gethostname()} \(since 20\S+\)"
    with pytest.raises(WorkdirError, match=rf"^--workdir={tmp_path}: {holder} trains in it"), workdir_lock(tmp_path):
        pytest.fail("two processes hold the lock")
    other.send_signal(signal.SIGKILL)
    other.wait()
    with workdir_lock(tmp_path):
        assert (tmp_path / FILE).read_text().startswith(f"process {os.getpid()} on")


def test_file_system_without_locks_is_warned_about(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with workdir_lock(tmp_path):
        assert "cannot be locked" in caplog.text
