import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparse_lm.data.workers import Workers
from sparse_lm.errors import DataError
from tests.command_lines import ROOT


def square(path: Path, number: int) -> None:
    if number < 0:
        raise DataError(f"{number} is negative")
    if number > 100:
        os.kill(os.getpid(), signal.SIGKILL)
    path.write_text(f"{number**2} {os.environ.get('RAYON_NUM_THREADS')} {os.getpid()}")


def linger(path: Path) -> None:
    path.with_suffix(".begun").write_text(str(os.getpid()))
    time.sleep(1000)


def test_several_processes_write_what_is_missing_and_say_what_goes_wrong(tmp_path):
    (tmp_path / "0").write_text("of an earlier run")
    with Workers(2, threads=3) as workers:
        workers.run("squaring", square, {tmp_path / str(number): (number,) for number in range(9)})
        assert (tmp_path / "0").read_text() == "of an earlier run"
        written = [(tmp_path / str(number)).read_text().split() for number in range(1, 9)]
        assert [(int(result), threads) for result, threads, _ in written] == [(n**2, "3") for n in range(1, 9)]
        assert str(os.getpid()) not in {process for *_, process in written}
        with pytest.raises(DataError, match=r"^-1 is negative$"):
            workers.run("squaring", square, {tmp_path / "10": (10,), tmp_path / "-1": (-1,)})
        with pytest.raises(DataError, match=r"a process was killed: .*--processes"):
            workers.run("squaring", square, {tmp_path / "101": (101,), tmp_path / "102": (102,)})


INTERRUPTED = """
import signal
import sys
from pathlib import Path
from sparse_lm.data.workers import Workers
from tests.data.test_workers import linger

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with Workers(2, threads=1) as workers:
        workers.run("waiting", linger, {Path(sys.argv[1], str(number)): () for number in range(4)})
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_an_interrupt_and_a_kill_end_tasks_at_once(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    command = [sys.executable, str(script), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while len(list(tmp_path.glob("*.begun"))) < 2:
        assert run.poll() is None
        time.sleep(0.01)
    if number == signal.SIGINT:
        os.killpg(run.pid, number)  # as a terminal does it: to every process
    else:
        run.kill()
    _, errors = run.communicate(timeout=30)  # the tasks' processes hold the stream until they end
    if number == signal.SIGINT:
        assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt")
