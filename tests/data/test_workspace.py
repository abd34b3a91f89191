import logging

import pytest

from sparse_lm.data import workspace


@pytest.fixture
def clock(monkeypatch):
    """Time stands still but for what a test adds to it."""
    now = [100.0]
    monkeypatch.setattr(workspace.time, "monotonic", lambda: now[0])  # the clock of `sparse_lm.progress`, too
    return now


def test_lines_tell_share_speed_density_and_time_left(clock, caplog, capsys):
    caplog.set_level(logging.INFO)
    tally = workspace.Tally("tokenising", "documents", 1000)
    tally({"saved": {"documents": 500, "tokens": 10**9, "bytes": 10**9}})  # of an earlier run: done, but not for speed
    clock[0] += 5
    tally({"documents": 40, "tokens": 30_000_000, "bytes": 120_000_000})
    assert capsys.readouterr().err == ""
    clock[0] += 15
    tally({"documents": 60, "tokens": 10_000_000, "bytes": 48_000_000})
    line = "tokenising, documents 600/1000 | 2.00 M tokens/s | 4.20 bytes a token | 1 min 20 s left\n"
    assert capsys.readouterr().err == line
    clock[0] += 20
    tally.log()
    assert caplog.messages == ["tokenising: done in 40 s, 1.00 M tokens/s, 4.20 bytes a token"]
