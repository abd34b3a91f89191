"""Compiles the programs of a run before its first step, side by side.

A program that does not compile, for want of memory, say, so ends a run at once and not after a dense phase. A
compilation takes minutes and cannot be stopped.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
from jax import Array

from sparse_lm.config import Config
from sparse_lm.training.evaluation import Evaluation
from sparse_lm.training.interrupt import Interrupt
from sparse_lm.training.step import Step, Trainer, TrainState
from sparse_lm.training.telemetry.step_log import StepLog
from sparse_lm.training.transitions import transition_before


def programs_from(
    step: int, config: Config, trainer: Trainer, transitions: dict[str, Step], evaluations: dict[str, Evaluation]
) -> dict[str, Any]:
    """Returns steps, transitions and evaluations of both phases, as far as they come from `step` to the end, by name.

    Each is lowered by a state and a batch.
    """
    steps = range(step, config.steps)
    coming = {name for later in steps for name in (config.phase(later), transition_before(config, later))}
    if "sparse" in coming and config.sparsity.leave:  # the phase may end with the run
        coming.add("leave")
    evaluated = [later + 1 for later in steps if later + 1 == config.steps or (later + 1) % config.eval_every == 0]
    coming |= {f"{config.phase_after(done)} evaluation" for done in evaluated}
    programs = trainer.steps | transitions | {f"{phase} evaluation": made for phase, made in evaluations.items()}
    return {name: program for name, program in programs.items() if name in coming}


def compile_programs(
    programs: dict[str, Any], state: TrainState, windows: Array, step: int, interrupt: Interrupt, log: StepLog
) -> bool:
    """Compiles them, and says so beside `step`; returns False if a signal came first: the state can be saved."""
    phases = [name for name in programs if name in ("dense", "sparse")]
    transitions = ", the phase transitions" if {"enter", "refresh", "leave"} & set(programs) else ""
    lowering = threading.Lock()

    def compile_program(name: str) -> None:
        # Python lowers as fast one after the other as all at a time, and so XLA has the first one earlier.
        with lowering:
            lowered = programs[name].lower(state, windows)
        lowered.compile()

    longest_first = sorted(programs, key=lambda name: name != "sparse")
    compilations = [functools.partial(compile_program, name) for name in longest_first]
    interrupt.answer = "saving what there is; the compilation is given up"
    with log.busy(step, f"compiling the {' and the '.join(phases)} step{transitions} and evaluation") as tick:
        if jax.process_count() > 1:  # processes could not agree to stop in the middle
            for compilation in compilations:
                compilation()
        elif not interrupt.wait_for(*compilations, meanwhile=tick):
            return False
    # Now: threads that compile side by side take more seconds together than pass, and those too many would be taken
    # from what follows, the first step.
    log.summary.spent_on("compile")
    interrupt.answer = "finishing the step under way, saving"
    return True
