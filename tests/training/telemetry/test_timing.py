import pytest

from sparse_lm.config import Config, SparsityConfig
from sparse_lm.recipes import SSte
from sparse_lm.training.telemetry.timing import StepTimer
from tests.clock import Clock

SPARSE_MIDDLE = Config(steps=100, sparsity=SparsityConfig(recipe=SSte(), start_step=20, end_step=60))


def run(timer: StepTimer, clock: Clock, steps: range, seconds: dict[str, float], compile_seconds: float = 50.0) -> None:
    """Steps of fixed length by phase; the first of each phase in this run takes longer."""
    previous = None
    for step in steps:
        phase = SPARSE_MIDDLE.phase(step)
        clock.now += seconds[phase] + (compile_seconds if phase != previous else 0)
        timer.step_done(phase)
        previous = phase


def test_each_phase_has_its_own_speed_and_compilation_does_not_count():
    clock = Clock()
    timer = StepTimer(SPARSE_MIDDLE, 0, clock)
    run(timer, clock, range(30), {"dense": 2.0, "sparse": 1.0})
    assert timer.seconds_left() == pytest.approx(30 * 1.0 + 40 * 2.0)


def test_resume_reckons_from_its_own_steps():
    clock = Clock()
    timer = StepTimer(SPARSE_MIDDLE, 50, clock)
    run(timer, clock, range(50, 55), {"sparse": 3.0})
    assert timer.seconds_left() == pytest.approx(45 * 3.0)
    run(timer, clock, range(55, 100), {"dense": 2.0, "sparse": 3.0})
    assert timer.seconds_left() == 0


def test_lap_is_the_mean_since_the_last_lap():
    clock = Clock()
    timer = StepTimer(SPARSE_MIDDLE, 0, clock)
    run(timer, clock, range(5), {"dense": 2.0})
    assert timer.lap() == pytest.approx(2.0)
    for seconds in (1.0, 3.0, 5.0):
        clock.now += seconds
        timer.step_done("dense")
    assert timer.lap() == pytest.approx(3.0)
    assert timer.lap() is None


def test_skipped_time_counts_nowhere():
    clock = Clock()
    timer = StepTimer(SPARSE_MIDDLE, 0, clock)
    run(timer, clock, range(3), {"dense": 2.0})
    clock.now += 1000.0  # an evaluation
    timer.skip()
    clock.now += 2.0
    timer.step_done("dense")
    assert timer.lap() == pytest.approx(2.0)
    assert timer.seconds_left() == pytest.approx(96 * 2.0)
