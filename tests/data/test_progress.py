import logging

import pytest

from sparse_lm.data import progress


@pytest.fixture
def clock(monkeypatch):
    """Time stands still but for what a test adds to it."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_tell_share_speed_density_and_time_left(clock, caplog):
    caplog.set_level(logging.INFO)
    watch = progress.Progress("tokenising", "documents", 1000)
    watch({"saved": {"documents": 500, "tokens": 10**9, "bytes": 10**9}})  # of an earlier run: done, but not for speed
    clock[0] += 5
    watch({"documents": 40, "tokens": 30_000_000, "bytes": 120_000_000})
    assert caplog.messages == []
    clock[0] += 15
    watch({"documents": 60, "tokens": 10_000_000, "bytes": 48_000_000})
    assert caplog.messages == ["tokenising: 60.0%, 2.00 M tokens/s, 4.20 bytes a token, 1 min 20 s left"]
    clock[0] += 20
    watch.finish()
    assert caplog.messages[1:] == ["tokenising: done in 40 s, 1.00 M tokens/s, 4.20 bytes a token"]


def test_what_is_quick_or_done_already_is_not_mentioned(clock, caplog):
    caplog.set_level(logging.INFO)
    watch = progress.Progress("reading the text", "parts", 2)
    watch({"saved": {"parts": 1}})
    watch({"parts": 1})
    watch.finish()
    assert caplog.messages == []
