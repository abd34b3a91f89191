"""Checks what is compiled before the first step, and that this counts as that and as nothing else."""

import dataclasses
import threading
import time
import types

import jax
import numpy as np
import pytest

from sparse_lm.training.compilation import compile_programs, programs_from
from sparse_lm.training.evaluation import Evaluation
from sparse_lm.training.telemetry.step_log import StepLog
from sparse_lm.training.telemetry.summary import COMPILE_EVENTS, RunSummary, read_summary
from tests import small
from tests.clock import Clock

CONFIG = small.config("slices")
NAMES = "enter", "refresh", "leave"


def program_of(compile):
    return types.SimpleNamespace(lower=lambda *_: types.SimpleNamespace(compile=compile))


@pytest.mark.parametrize(
    "start, names",
    [
        (0, ["dense", "sparse", *NAMES, "dense evaluation", "sparse evaluation"]),
        (CONFIG.sparsity.phase.start + 1, ["dense", "sparse", *NAMES[1:], "dense evaluation", "sparse evaluation"]),
        (CONFIG.sparsity.phase.stop, ["dense", "leave", "dense evaluation"]),
        (CONFIG.sparsity.phase.stop + 1, ["dense", "dense evaluation"]),
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

        return program_of(compile)

    transitions, phases = {name: program(name) for name in NAMES}, ("dense", "sparse")
    trainer = types.SimpleNamespace(steps={name: program(name) for name in phases})
    evaluations = {name: program(f"{name} evaluation") for name in phases}
    config = dataclasses.replace(CONFIG, eval_every=CONFIG.sparsity.phase.stop)
    programs = programs_from(start, config, trainer, transitions, evaluations)
    with RunSummary(tmp_path, CONFIG, clock) as summary, StepLog(CONFIG, tmp_path, summary, start) as log:
        compile_programs(programs, None, None, start, log)
        clock.now += 3
        summary.step_done("sparse")
    assert sorted(compiled) == sorted(names)
    seconds = read_summary(tmp_path)["seconds"]
    assert (seconds["compile"], seconds["sparse"]) == (10 * len(names), 3)


def test_programs_compile_side_by_side_and_an_error_is_raised_once_all_have_ended(tmp_path):
    both, ended = threading.Barrier(2, timeout=60), []

    def fail():
        both.wait()
        raise NotImplementedError("no such kernel")

    def succeed():
        both.wait()
        time.sleep(0.1)
        ended.append("dense")

    programs = {"sparse": program_of(fail), "dense": program_of(succeed)}
    with RunSummary(tmp_path, CONFIG) as summary, StepLog(CONFIG, tmp_path, summary, 0) as log:
        with pytest.raises(NotImplementedError, match="no such kernel"):
            compile_programs(programs, None, None, 0, log)
        assert ended == ["dense"]


@pytest.mark.parametrize("options", [{"microbatches": 2}, {"mesh.data": 4, "mesh.fsdp": 2, "batch_size": 8}])
def test_an_evaluation_that_was_compiled_ahead_compiles_nothing_and_takes_a_microbatch(options, caplog):
    config = small.config("slices", **options)
    trainer, _ = small.compiled(config)
    layout, windows = trainer.layout, np.asarray(small.windows(config))
    state, bytes_per_token = trainer.init(), np.ones(config.model.vocab_size, np.int32)
    evaluation = Evaluation(config, trainer.graphdef, bytes_per_token, config.recipe("sparse"), layout)
    with jax.log_compiles():
        evaluation.lower(state, (layout.place_rows if layout else jax.device_put)(windows)).compile()
        assert any(message.startswith("Compiling") for message in caplog.messages)
        caplog.clear()
        evaluation(state.params, state.recipe_state, [windows[: config.batch_size // config.microbatches]])
    assert not [message for message in caplog.messages if message.startswith("Compiling")]
