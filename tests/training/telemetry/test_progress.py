import io

from sparse_lm.training.telemetry.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_log_gets_one_plain_line_an_update():
    log = io.StringIO()
    progress = Progress(600, stream=log)
    progress.update(1, phase="dense", loss=8.3178, tokens_per_second=None, seconds_left=None)
    progress.update(120, phase="sparse", loss=3.41204, tokens_per_second=45213.4, seconds_left=133.2)
    progress.close()
    assert log.getvalue().splitlines() == [
        "step 1/600 | dense | loss 8.3178 | - tokens/s | - left",
        "step 120/600 | sparse | loss 3.4120 | 45,213 tokens/s | 2 min 13 s left",
    ]


def test_terminal_gets_a_live_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    progress = Progress(600, start_step=100, stream=terminal)
    progress.update(120, phase="sparse", loss=3.41204, tokens_per_second=45213.4, seconds_left=133.2)
    progress.close()
    text = terminal.getvalue()
    assert "100/600" in text and "120/600" in text
    assert "sparse | loss 3.4120 | 45,213 tokens/s | 2 min 13 s left" in text
    assert "\x1b[" in text  # drawn in place, not scrolled


def test_standard_output_by_default(capsys):
    Progress(5).update(5, phase="dense", loss=1.0, tokens_per_second=1.0, seconds_left=0.0)
    assert capsys.readouterr().out == "step 5/5 | dense | loss 1.0000 | 1 tokens/s | 0 s left\n"
