import os
import signal
import subprocess
import sys

import pytest

from sparse_lm.training.interrupt import Interrupt
from tests.command_lines import run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request_and_the_handlers_of_before_come_back(number, capfd):
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), number)
        assert interrupt.requested == signal.Signals(number).name
        line = f"{interrupt.requested}: finishing the step under way, saving; again to stop now\n"
        assert capfd.readouterr().err == line
    assert signal.getsignal(number) == before


def test_a_request_that_nobody_reads_is_one_all_the_same():
    code = """
import os, signal
from sparse_lm.progress import Progress
from sparse_lm.training.interrupt import Interrupt

with Interrupt() as interrupt:
    os.kill(os.getpid(), signal.SIGINT)
    Progress("step", 9).note(5, "saving")
    Progress("step", 9).update(6)
    os._exit(0 if interrupt.requested else 1)
"""
    reader, writer = os.pipe()
    os.close(reader)
    assert subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=writer).returncode == 0
    os.close(writer)


@pytest.mark.parametrize("number, second", [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGINT)])
def test_a_second_signal_kills_at_once(number, second):
    """It does so even while a thread works that no end of the process would leave unfinished."""
    code = f"""
import os, time
from concurrent.futures import ThreadPoolExecutor
from sparse_lm.training.interrupt import Interrupt

with Interrupt(), ThreadPoolExecutor() as threads:
    work = threads.submit(time.sleep, 600)
    os.kill(os.getpid(), {number:d})
    os.kill(os.getpid(), {second:d})
    work.result()
"""
    assert run([sys.executable, "-c", code]).returncode == -second
