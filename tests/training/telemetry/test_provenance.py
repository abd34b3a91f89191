import os
import shutil
import subprocess

import pytest

from sparse_lm.training.telemetry.provenance import git_commit


def git(directory, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(directory), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_is_the_checkouts_own(tmp_path):
    assert git_commit(tmp_path) is None
    git(tmp_path, "init")
    assert git_commit(tmp_path) is None  # nothing is committed yet
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    index = tmp_path / ".git" / "index"
    os.utime(tmp_path / "file", (1, 1))  # which git would note in its index
    before = index.read_bytes()
    assert git_commit(tmp_path) == head
    assert index.read_bytes() == before
    (tmp_path / "file").write_text("two")
    assert git_commit(tmp_path) == f"{head}-dirty"
    (tmp_path / "inside").mkdir()
    assert git_commit(tmp_path / "inside") is None  # the checkout around it is some other project's
