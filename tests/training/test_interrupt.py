import os
import signal
import threading
import time

import pytest

from sparse_lm.training.interrupt import Interrupt


def test_works_are_done_side_by_side_and_what_they_raise_is_raised():
    def work():
        raise NotImplementedError("no such kernel")

    both = threading.Barrier(2, timeout=60)
    with Interrupt() as interrupt:
        assert interrupt.wait_for(both.wait, both.wait)
        with pytest.raises(NotImplementedError, match="no such kernel"):
            interrupt.wait_for(lambda: None, work)
        assert interrupt.requested is None


@pytest.mark.parametrize("number, second", [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGINT)])
def test_a_signal_ends_the_waiting_and_a_second_one_acts_at_once(number, second, capfd):
    acted = []
    before = {each: signal.signal(each, lambda number, _: acted.append(number)) for each in (number, second)}
    release = threading.Event()
    try:
        with Interrupt() as interrupt:
            start = time.monotonic()
            interrupt.answer = "finishing the step"
            assert not interrupt.wait_for(lambda: release.wait(60), meanwhile=lambda: os.kill(os.getpid(), number))
            assert time.monotonic() - start < 10
            assert interrupt.requested == signal.Signals(number).name
            assert not acted
            assert capfd.readouterr().err == f"{interrupt.requested}: finishing the step; again to stop now\n"
            os.kill(os.getpid(), second)
            assert acted == [second]
            assert interrupt.requested == signal.Signals(number).name
    finally:
        release.set()
        for each, handler in before.items():
            signal.signal(each, handler)
