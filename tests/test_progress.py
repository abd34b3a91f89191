import io

from sparse_lm import progress
from sparse_lm.progress import Progress
from tests.clock import Clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_keep_their_distance(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    log = io.StringIO()
    steps = Progress("step", 60, stream=log, line_seconds=10)
    for step in range(60):
        steps.update(step)
        clock.now += 1
    assert log.getvalue().splitlines() == [f"step {step}/60" for step in (10, 20, 30, 40, 50)]


def test_terminal_sees_a_bar_and_lines_that_stay(monkeypatch):
    """A log gets the lines alone."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    log, terminal = io.StringIO(), Terminal()
    for stream in (log, terminal):
        steps = Progress("step", 9, stream=stream)
        steps.move(4)
        with steps.busy(5, "compiling [x]"):
            clock.now += 62
        steps.note(5, "saving")
        steps.close()
    lines = ["step 5: compiling [x]: 1 min 02 s", "step 5: saving"]
    assert log.getvalue().splitlines() == ["step 5: compiling [x]", *lines]
    for shown in ("5/9", "compiling [x]", *lines):
        assert shown in terminal.getvalue()
