"""Times of steps: each is a whole step's, whether or not the host runs ahead of the device."""

import time

import pytest

from experiments.bench.step_timing import time_steps

STEP = 0.02  # seconds


class Loss:
    """A device's result that is there from `ready` on."""

    def __init__(self, ready, value=2.0):
        self.ready, self.value = ready, value

    def block_until_ready(self):
        time.sleep(max(0.0, self.ready - time.perf_counter()))
        return self

    def __float__(self):
        self.block_until_ready()
        return self.value


def ahead(end_of_last, batch):
    """A step whose dispatch returns at once; the device takes them one after the other."""
    end = max(end_of_last, time.perf_counter()) + STEP
    return end, {"loss": Loss(end)}


def waiting(share):
    """A step whose dispatch returns when the device has done that share of it."""

    def step(end_of_last, batch):
        end, metrics = ahead(end_of_last, batch)
        time.sleep(max(0.0, end - (1 - share) * STEP - time.perf_counter()))
        return end, metrics

    return step


@pytest.mark.parametrize("step", [ahead, waiting(0.5)], ids=["ahead", "half"])
def test_every_time_is_of_a_whole_step(step):
    _, seconds = time_steps(step, 0.0, ["a", "b"], warmup=1, timed=4)
    assert len(seconds) == 4
    assert sum(seconds) == pytest.approx(4 * STEP, rel=0.3)
    assert min(seconds) > 0.5 * STEP


def test_warmup_is_not_timed():
    delays = iter([0.1, 0.1, 0.1, 0.0, 0.0, 0.0])

    def step(state, batch):
        time.sleep(next(delays))
        return state, {"loss": 1.0}

    _, seconds = time_steps(step, None, [None], warmup=2, timed=2)
    assert len(seconds) == 2 and max(seconds) < 0.05


def test_a_loss_that_is_not_finite_is_an_error():
    with pytest.raises(RuntimeError, match="the loss is nan"):
        time_steps(lambda state, batch: (state, {"loss": float("nan")}), None, [None], warmup=0, timed=1)
