import dataclasses

import pytest

from sparse_lm.config import Config, SparsityConfig
from sparse_lm.training.timing import StepTimer

SPARSE_MIDDLE = Config(steps=100, sparsity=SparsityConfig(recipe="sste", start_step=20, end_step=60))
TURNS = Config(
    steps=100, sparsity=SparsityConfig(recipe="venom", start_step=20, end_step=60, dense_activations_every=4)
)  # fmt: skip


@dataclasses.dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def run(timer: StepTimer, clock: Clock, steps: range, seconds: dict[str, float], config: Config = SPARSE_MIDDLE):
    """Steps of fixed length by kind; the first of each kind in a phase of this run takes 50 s longer."""
    previous, seen = None, set()
    for step in steps:
        phase, kind = config.phase(step), config.step_kind(step)
        seen = seen if phase == previous else set()
        clock.now += seconds[kind] + (50 if kind not in seen else 0)
        timer.step_done(step)
        previous, seen = phase, seen | {kind}


def test_nothing_is_known_before_the_first_timed_step():
    clock = Clock()
    timer = StepTimer(SPARSE_MIDDLE, 0, clock)
    assert timer.lap() is None and timer.seconds_left() is None
    run(timer, clock, range(1), {"dense": 2.0})
    assert timer.lap() is None and timer.seconds_left() is None


def test_unseen_phase_is_taken_to_run_like_the_seen_one():
    clock = Clock()
    timer = StepTimer(SPARSE_MIDDLE, 0, clock)
    run(timer, clock, range(11), {"dense": 2.0})
    assert timer.lap() == (pytest.approx(2.0), {"dense": 10})
    assert timer.seconds_left() == pytest.approx(89 * 2.0)


def test_each_phase_has_its_own_speed_and_compilation_does_not_count():
    clock = Clock()
    timer = StepTimer(SPARSE_MIDDLE, 0, clock)
    run(timer, clock, range(30), {"dense": 2.0, "sparse": 1.0})
    assert timer.seconds_left() == pytest.approx(30 * 1.0 + 40 * 2.0)


def test_kinds_that_take_turns_have_their_own_speeds():
    clock = Clock()
    timer = StepTimer(TURNS, 0, clock)
    run(timer, clock, range(20), {"dense": 2.0})
    timer.lap()
    run(timer, clock, range(20, 28), {"sparse": 1.0, "dense_activations": 3.0}, TURNS)
    assert timer.lap() == (pytest.approx((5 * 1.0 + 3.0) / 6), {"sparse": 5, "dense_activations": 1})
    assert timer.seconds_left() == pytest.approx(8 * (3 * 1.0 + 3.0) + 40 * 2.0)


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
    assert timer.lap().seconds == pytest.approx(2.0)
    for step, seconds in ((5, 1.0), (6, 3.0), (7, 5.0)):
        clock.now += seconds
        timer.step_done(step)
    assert timer.lap().seconds == pytest.approx(3.0)
    assert timer.lap() is None


def test_skipped_time_counts_nowhere():
    clock = Clock()
    timer = StepTimer(SPARSE_MIDDLE, 0, clock)
    run(timer, clock, range(3), {"dense": 2.0})
    clock.now += 1000.0  # an evaluation
    timer.skip()
    clock.now += 2.0
    timer.step_done(3)
    assert timer.lap().seconds == pytest.approx(2.0)
    assert timer.seconds_left() == pytest.approx(96 * 2.0)
