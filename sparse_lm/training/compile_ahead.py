"""Compiles what a run needs before its first step."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import Array

from sparse_lm.config import Config
from sparse_lm.training.interrupt import Interrupt
from sparse_lm.training.step import Trainer, TrainState
from sparse_lm.training.telemetry.step_log import StepLog
from sparse_lm.training.transitions import Transitions, transition_before


class CompileAhead:
    """Compiles the steps of both phases and the transitions between them, side by side.

    A program that does not compile, for want of memory, say, so ends a run at once and not after a dense phase. A
    compilation takes minutes and cannot be stopped; a signal meanwhile finds a state that can be saved.
    """

    def __init__(self, config: Config, trainer: Trainer, transitions: Transitions, interrupt: Interrupt, log: StepLog):
        self._config, self._trainer, self._transitions = config, trainer, transitions
        self._interrupt, self._log = interrupt, log
        self._compiled = False

    def compile(self, step: int, state: TrainState, windows: Array) -> bool:
        """Compiles what the steps from `step` on need, unless this process has; False if a signal came first."""
        if self._compiled:
            return True
        self._compiled = True
        steps = range(step, self._config.steps)
        phases = sorted({self._config.phase(later) for later in steps})
        programs = [(self._trainer.step(phase), (state, windows)) for phase in phases]
        coming = {transition_before(self._config, later) for later in steps}
        if "enter" in coming:
            programs.append((self._transitions.enter_sparse, (state, windows)))
        if "refresh" in coming:
            programs.append((self._transitions.refresh, (state, windows)))
        if "leave" in coming or "sparse" in phases:  # every sparse phase ends
            programs.append((self._transitions.leave_sparse, (state,)))

        compilations = [functools.partial(_compile, *program) for program in programs]
        self._interrupt.answer = "saving what there is; the compilation is given up"
        transitions = " and the phase transitions" if len(programs) > len(phases) else ""
        with self._log.busy(step, f"compiling the {' and the '.join(phases)} step{transitions}") as tick:
            if jax.process_count() > 1:  # processes could not agree to stop in the middle
                for compilation in compilations:
                    compilation()
            elif not self._interrupt.wait_for(*compilations, meanwhile=tick):
                return False
        # Now: threads that compile side by side take more seconds together than pass, and those too many would be taken
        # from what follows, the first step.
        self._log.spent_on("compile")
        return True


def _compile(program: Any, arguments: tuple[Any, ...]) -> None:
    program.lower(*arguments).compile()
