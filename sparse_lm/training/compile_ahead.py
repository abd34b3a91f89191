"""Compiles what a run needs before its first step."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from sparse_lm.config import Config
from sparse_lm.training.interrupt import Interrupt
from sparse_lm.training.step import Trainer, TrainState
from sparse_lm.training.telemetry.step_log import StepLog
from sparse_lm.training.transitions import Transitions, transition_before


def compile_ahead(
    config: Config,
    trainer: Trainer,
    transitions: Transitions,
    interrupt: Interrupt,
    log: StepLog,
    step: int,
    state: TrainState,
    windows: Array,
) -> bool:
    """Compiles the steps of both phases and the transitions between them, side by side, from `step` to the end.

    A program that does not compile, for want of memory, say, so ends a run at once and not after a dense phase. A
    compilation takes minutes and cannot be stopped; a signal meanwhile finds a state that can be saved.

    Returns:
      True if all is compiled, False if a signal came first.
    """
    steps = range(step, config.steps)
    phases = sorted({config.phase(later) for later in steps})
    programs: list[tuple[Any, ...]] = [(trainer.step(phase), state, windows) for phase in phases]
    coming = {transition_before(config, later) for later in steps}
    if "enter" in coming:
        programs.append((transitions.enter_sparse, state, windows))
    if "refresh" in coming:
        programs.append((transitions.refresh, state, windows))
    if "leave" in coming or "sparse" in phases:  # every sparse phase ends
        programs.append((transitions.leave_sparse, state))
    compilations = [lambda f=function, a=arguments: f.lower(*a).compile() for function, *arguments in programs]
    interrupt.answer = "saving what there is; the compilation is given up"
    and_transitions = " and the phase transitions" if len(programs) > len(phases) else ""
    with log.busy(step, f"compiling the {' and the '.join(phases)} step{and_transitions}") as tick:
        if jax.process_count() > 1:  # processes could not agree to stop in the middle
            for compilation in compilations:
                compilation()
        elif not interrupt.wait_for(*compilations, meanwhile=tick):
            return False
    # Now: threads that compile side by side take more seconds together than pass, and those too many would be taken
    # from what follows, the first step.
    log.summary.spent_on("compile")
    return True
