"""Checks that the time in which a phase is compiled counts as that and as nothing else."""

import types

import jax

from sparse_lm.training.compile_ahead import compile_ahead
from sparse_lm.training.interrupt import Interrupt
from sparse_lm.training.telemetry.step_log import StepLog
from sparse_lm.training.telemetry.summary import COMPILE_EVENTS, RunSummary, read_summary
from tests import small
from tests.clock import Clock


class Program:
    """Takes `seconds` of a clock, and says that it took 10 of its thread."""

    def __init__(self, clock, seconds):
        self._clock, self._seconds = clock, seconds

    def lower(self, *_):
        return self

    def compile(self):
        self._clock.now += self._seconds
        jax.monitoring.record_event_duration_secs(f"{COMPILE_EVENTS}backend_compile_duration", 10)


def test_transitions_and_the_first_step_count_however_many_programs_compile_side_by_side(tmp_path):
    config, clock = small.config("slices"), Clock()
    step, at_once = Program(clock, 10), Program(clock, 0)
    trainer = types.SimpleNamespace(step=dict(sparse=step, dense=at_once).get)
    transitions = types.SimpleNamespace(enter_sparse=at_once, refresh=at_once, leave_sparse=at_once)
    with (
        RunSummary(tmp_path, config, clock) as summary,
        StepLog(config, None, tmp_path, summary, 4) as log,
        Interrupt() as interrupt,
    ):
        assert compile_ahead(config, trainer, transitions, interrupt, log, 4, None, None)
        clock.now += 3
        summary.step_done("sparse")
    seconds = read_summary(tmp_path)["seconds"]
    assert (seconds["compile"], seconds["sparse"]) == (10, 3)


def test_all_that_a_run_needs_compiles_before_its_first_step(tmp_path):
    config, compiled = small.config("slices"), []

    def program(name):
        return types.SimpleNamespace(lower=lambda *_: types.SimpleNamespace(compile=lambda: compiled.append(name)))

    trainer = types.SimpleNamespace(step=program)
    transitions = types.SimpleNamespace(**{name: program(name) for name in ("enter_sparse", "refresh", "leave_sparse")})
    for start, names in (
        (0, {"dense", "sparse", "enter_sparse", "refresh", "leave_sparse"}),
        (config.sparsity.phase.start + 1, {"dense", "sparse", "refresh", "leave_sparse"}),
        (config.sparsity.phase.stop, {"dense", "leave_sparse"}),
        (config.sparsity.phase.stop + 1, {"dense"}),
    ):
        compiled.clear()
        with (
            RunSummary(tmp_path, config) as summary,
            StepLog(config, None, tmp_path, summary, start) as log,
            Interrupt() as interrupt,
        ):
            assert compile_ahead(config, trainer, transitions, interrupt, log, start, None, None)
        assert sorted(compiled) == sorted(names)
