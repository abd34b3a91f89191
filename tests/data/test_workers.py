import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparse_lm.data.errors import DataError
from sparse_lm.data.workers import Workers

ROOT = Path(__file__).parents[2]


def square(number: int, path: Path, report) -> dict:
    if number < 0:
        raise DataError(f"{number} is negative")
    if number > 100:
        os.kill(os.getpid(), signal.SIGKILL)
    report({"numbers": 1})
    return {"square": number**2, "process": os.getpid(), "threads": os.environ.get("RAYON_NUM_THREADS")}


def linger(path: Path, report) -> dict:
    path.with_suffix(".begun").write_text(str(os.getpid()))
    time.sleep(1000)
    return {}


def tasks_in(folder: Path, numbers) -> dict:
    return {folder / f"{number}.json": functools.partial(square, number) for number in numbers}


def test_several_processes_give_results_and_say_what_goes_wrong(tmp_path):
    reports = []
    with Workers(2, threads=3) as workers:
        tasks = tasks_in(tmp_path, range(9))
        results = workers.run(tasks, reports.append)
        assert [results[path]["square"] for path in tasks] == [number**2 for number in range(9)]
        assert {result["process"] for result in results.values()} & {os.getpid()} == set()
        assert {result["threads"] for result in results.values()} == {"3"}
        assert reports == [{"numbers": 1}] * 9
        with pytest.raises(DataError, match=r"^-1 is negative$") as raised:
            workers.run(tasks_in(tmp_path, [10, -1]), reports.append)
        assert "in square" in str(raised.value.__cause__)
        with pytest.raises(DataError, match=r"a process was killed: .*--processes"):
            workers.run(tasks_in(tmp_path, [101, 102]), reports.append)
    assert not (tmp_path / "-1.json").exists()


INTERRUPTED = """
import signal
import sys
from pathlib import Path
from sparse_lm.data.workers import Workers
from tests.data.test_workers import linger

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with Workers(2) as workers:
        workers.run({Path(sys.argv[1], f"{number}.json"): linger for number in range(4)}, print)
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_an_interrupt_and_a_kill_end_tasks_at_once(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    command = [sys.executable, str(script), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while len(begun := list(tmp_path.glob("*.begun"))) < 2:
        assert run.poll() is None
        time.sleep(0.01)
    if number == signal.SIGINT:
        os.killpg(run.pid, number)  # as a terminal does it: to every process
    else:
        run.kill()
    _, errors = run.communicate(timeout=30)  # the tasks' processes hold the stream until they end
    if number == signal.SIGINT:
        assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt")
        assert not any(Path("/proc", path.read_text()).exists() for path in begun)
