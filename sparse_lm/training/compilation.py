"""Compiles the programs of a run before its first step, side by side.

A program that does not compile, for want of memory, say, so ends a run at once and not after a dense phase. A
compilation cannot be stopped: a signal is obeyed after it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax import Array

from sparse_lm.config import Config
from sparse_lm.training.evaluation import Evaluation
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


def compile_programs(programs: dict[str, Any], state: TrainState, windows: Array, step: int, log: StepLog) -> None:
    """Compiles them, and says so beside `step`. What one compilation raises is raised once all have ended."""
    phases = [name for name in programs if name in ("dense", "sparse")]
    transitions = ", the phase transitions" if {"enter", "refresh", "leave"} & set(programs) else ""
    longest_first = sorted(programs, key=lambda name: name != "sparse")
    with (
        log.progress.busy(step, f"compiling the {' and the '.join(phases)} step{transitions} and evaluation"),
        ThreadPoolExecutor(1 if jax.process_count() > 1 else None) as threads,  # all processes in the same order
    ):
        # Python lowers as fast one after the other as all at a time, and so XLA has the first one earlier.
        compilations = [threads.submit(programs[name].lower(state, windows).compile) for name in longest_first]
        for compilation in compilations:
            compilation.result()
    # Now: threads that compile side by side take more seconds together than pass, and those too many would be taken
    # from what follows, the first step.
    log.summary.spent_on("compile")
