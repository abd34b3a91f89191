import io

import pytest

from sparse_lm import progress
from sparse_lm.progress import Progress, show_speed, show_time_left

FACTS = ("sparse", "loss 3.4120", show_speed(45213.4), show_time_left(133.2))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_log_gets_one_plain_line_an_update():
    log = io.StringIO()
    steps = Progress("step", 600, stream=log)
    steps.update(1, "dense", show_speed(None), show_time_left(None))
    steps.update(120, *FACTS)
    steps.close()
    assert log.getvalue().splitlines() == [
        "step 1/600 | dense | - tokens/s | - left",
        "step 120/600 | sparse | loss 3.4120 | 45,213 tokens/s | 2 min 13 s left",
    ]


def test_lines_keep_their_distance(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    log = io.StringIO()
    steps = Progress("step", 60, stream=log, line_seconds=10)
    for step in range(60):
        steps.update(step)
        now[0] += 1
    assert log.getvalue().splitlines() == [f"step {step}/60" for step in (10, 20, 30, 40, 50)]


@pytest.mark.parametrize("line_seconds", [0, 10])
def test_terminal_gets_a_live_bar(monkeypatch, line_seconds):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    steps = Progress("step", 600, 100, stream=terminal, line_seconds=line_seconds)
    steps.update(120, *FACTS)
    steps.close()
    text = terminal.getvalue()
    assert "step" in text and "100/600" in text and "120/600" in text
    assert "sparse | loss 3.4120 | 45,213 tokens/s | 2 min 13 s left" in text
    assert "\x1b[" in text  # drawn in place, not scrolled


def test_standard_output_by_default(capsys):
    Progress("step", 5).update(5, "dense")
    assert capsys.readouterr().out == "step 5/5 | dense\n"
