import os
import signal
import subprocess
import sys
import time

import pytest

from sparse_lm.data.corpus import TextFiles
from sparse_lm.data.workers import Workers
from sparse_lm.errors import DataError
from tests.command_lines import ROOT


def square(number: int) -> tuple[int, str | None, int]:
    if number < 0:
        raise DataError(f"{number} is negative")
    if number > 100:
        os.kill(os.getpid(), signal.SIGKILL)
    return number**2, os.environ.get("RAYON_NUM_THREADS"), os.getpid()


def linger(corpus: TextFiles) -> None:
    corpus.paths[0].with_suffix(".begun").write_text("")
    time.sleep(1000)


def test_several_processes_give_results_in_order_and_say_what_goes_wrong():
    with Workers(2, threads=3) as workers:
        results = list(workers.map("squaring", square, [(number,) for number in range(9)]))
        assert [result[:2] for result in results] == [(number**2, "3") for number in range(9)]
        assert os.getpid() not in {process for *_, process in results}
        with pytest.raises(DataError, match=r"^-1 is negative$"):
            list(workers.map("squaring", square, [(10,), (-1,)]))
        with pytest.raises(DataError, match=r"a process was killed: .*--processes"):
            list(workers.map("squaring", square, [(101,), (102,)]))


INTERRUPTED = """
import signal, time
from concurrent.futures import ProcessPoolExecutor
from sparse_lm import prepare_data
from sparse_lm.data import builder, corpus
from tests.data.test_workers import linger

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    corpus.PART_BYTES, builder.survey_documents = 1, linger
    shutdown = ProcessPoolExecutor.shutdown  # later than the pool notices that its processes are dead
    ProcessPoolExecutor.shutdown = lambda pool: (time.sleep(0.5), shutdown(pool))
    prepare_data.cli()
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_an_interrupt_and_a_kill_end_all_processes_at_once_and_only_a_kill_leaves_a_hidden_folder(tmp_path, number):
    script, text, output = tmp_path / "script.py", tmp_path / "text", tmp_path / "outputs" / "data"
    script.write_text(INTERRUPTED)
    text.mkdir()
    for name in "abcd":
        (text / f"{name}.txt").write_text(name)
    command = [sys.executable, str(script), f"--files={text}/*.txt", f"--output={output}", "--processes=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while len(list(text.glob("*.begun"))) < 2:
        assert run.poll() is None
        time.sleep(0.01)
    (os.killpg if number == signal.SIGINT else os.kill)(run.pid, number)  # a terminal interrupts every process
    _, errors = run.communicate(timeout=30)  # the tasks' processes hold the stream until they end
    assert "Traceback" not in errors
    if number == signal.SIGINT:
        assert errors.rstrip().endswith("interrupted") and not list(output.parent.iterdir())
    else:
        (left,) = output.parent.iterdir()
        assert left.name.startswith(".data.")
