"""Compiles what a phase needs before the phase begins."""

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
    """Compiles the step of a phase and the transitions of the sparse phase.

    A compilation takes minutes and cannot be stopped. It happens before the state crosses the phase transition, so
    that a signal meanwhile finds a state that can be saved.
    """

    def __init__(self, config: Config, trainer: Trainer, transitions: Transitions, interrupt: Interrupt, log: StepLog):
        self._config, self._trainer, self._transitions = config, trainer, transitions
        self._interrupt, self._log = interrupt, log
        self._compiled: set[str] = set()  # phases

    def compile(self, step: int, state: TrainState, windows: Array) -> bool:
        """Compiles what the phase of `step` needs, unless this process has; False if a signal came first."""
        phase = self._config.phase(step)
        if phase in self._compiled:
            return True
        self._compiled.add(phase)
        programs = [(self._trainer.step(phase), (state, windows))]
        if phase == "sparse":
            coming = {transition_before(self._config, later) for later in range(step, self._config.steps)}
            if "enter" in coming:
                programs.append((self._transitions.enter_sparse, (state, windows)))
            if "refresh" in coming:
                programs.append((self._transitions.refresh, (state, windows)))
            programs.append((self._transitions.leave_sparse, (state,)))  # every sparse phase ends

        compilations = [functools.partial(_compile, *program) for program in programs]
        self._interrupt.answer = "saving what there is; the compilation is given up"
        transitions = " and the phase transitions" if len(programs) > 1 else ""
        with self._log.busy(step, f"compiling the {phase} step{transitions}") as tick:
            if jax.process_count() > 1:  # processes could not agree to stop in the middle
                for compilation in compilations:
                    compilation()
            elif not self._interrupt.wait_for(*compilations, meanwhile=tick):
                return False
        # Now: threads that compile side by side take more seconds together than pass, and those too many would be taken
        # from what follows, the transition and the first step of the phase.
        self._log.spent_on("compile")
        return True


def _compile(program: Any, arguments: tuple[Any, ...]) -> None:
    program.lower(*arguments).compile()
