"""A disk that refuses, here by a limit on the size of files, loses nothing and stops nobody."""

import contextlib
import resource

import numpy as np

from sparse_lm.training.telemetry.appended_file import AppendedFile
from sparse_lm.training.telemetry.metrics import MetricsWriter
from tests.training.telemetry.test_metrics import events, lines


@contextlib.contextmanager
def files_of_at_most(size):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def test_lines_that_a_full_disk_refuses_are_written_when_it_has_room(tmp_path, caplog):
    path = tmp_path / "lines"
    expected = [f"line {i} " + "x" * 100 for i in range(40)]
    written = AppendedFile(path)
    with files_of_at_most(1000):  # in the middle of a line
        for line in expected[:30]:
            written.write(f"{line}\n".encode())
        assert path.stat().st_size == 1000
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    for line in expected[30:]:
        written.write(f"{line}\n".encode())
    written.close()
    assert path.read_text().splitlines() == expected


def test_lines_that_never_fit_are_counted(tmp_path, caplog):
    with files_of_at_most(5):
        written = AppendedFile(tmp_path / "lines")
        written.write(b"0123456789")
        written.close()
    assert "lacks its last 5 bytes" in caplog.text


def test_metrics_go_on_after_a_full_disk(tmp_path):
    values = np.random.default_rng(0).standard_normal(300)
    with MetricsWriter(tmp_path) as writer:
        with files_of_at_most(1000):
            for step in range(250):
                writer.write(step, {"loss": values[step]})
        for step in range(250, 300):
            writer.write(step, {"loss": values[step]})
    assert [line["loss"] for line in lines(tmp_path)] == values.tolist()
    assert events(tmp_path)["loss"] == list(enumerate(np.float32(values)))
