"""Checks what is compiled before the first step, and that this counts as that and as nothing else."""

import types

import jax
import pytest

from sparse_lm.training.compilation import compile_programs, programs_from
from sparse_lm.training.interrupt import Interrupt
from sparse_lm.training.telemetry.step_log import StepLog
from sparse_lm.training.telemetry.summary import COMPILE_EVENTS, RunSummary, read_summary
from tests import small
from tests.clock import Clock

CONFIG = small.config("slices")
NAMES = "enter", "refresh", "leave"


@pytest.mark.parametrize(
    "start, names",
    [
        (0, ["dense", "sparse", *NAMES]),
        (CONFIG.sparsity.phase.start + 1, ["dense", "sparse", *NAMES[1:]]),
        (CONFIG.sparsity.phase.stop, ["dense", "leave"]),
        (CONFIG.sparsity.phase.stop + 1, ["dense"]),
    ],
)
def test_all_that_a_run_needs_compiles_before_its_first_step(start, names, tmp_path):
    """A program takes 10 seconds of a clock, and says that it took 15 of its thread."""
    clock, compiled = Clock(), []

    def program(name):
        def compile():
            clock.now += 10
            compiled.append(name)
            jax.monitoring.record_event_duration_secs(f"{COMPILE_EVENTS}backend_compile_duration", 15)

        return types.SimpleNamespace(lower=lambda *_: types.SimpleNamespace(compile=compile))

    transitions = {name: program(name) for name in NAMES}
    programs = programs_from(
        start, CONFIG, types.SimpleNamespace(steps={name: program(name) for name in ("dense", "sparse")}), transitions
    )
    with (
        RunSummary(tmp_path, CONFIG, clock) as summary,
        StepLog(CONFIG, tmp_path, summary, start) as log,
        Interrupt() as interrupt,
    ):
        assert compile_programs(programs, None, None, start, interrupt, log)
        clock.now += 3
        summary.step_done("sparse")
    assert sorted(compiled) == sorted(names)
    seconds = read_summary(tmp_path)["seconds"]
    assert (seconds["compile"], seconds["sparse"]) == (10 * len(names), 3)
