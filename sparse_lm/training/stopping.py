"""Ends a run before its last step: on request, or because its steps have gone bad."""

from __future__ import annotations

import jax

from sparse_lm.config import Config
from sparse_lm.training.interrupt import Interrupt
from sparse_lm.training.mesh import processes


class TooManyBadSteps(RuntimeError):
    """Loss or gradient was not finite, or the loss a spike, for too many steps in a row."""

    def __init__(self, count: int, step: int, workdir: str):
        super().__init__(
            f"loss or gradient was not finite, or the loss a spike, in {count} steps in a row, "
            f"up to step {step}; they changed nothing, and the state is saved in {workdir}"
        )


def is_to_stop(config: Config, interrupt: Interrupt, step: int) -> bool:
    """True if a signal asks to end the run before `step`.

    Several processes ask each other, which waits for the device, so that they do it every `log_every` steps only.
    """
    if jax.process_count() == 1:
        return interrupt.requested is not None
    return step % config.log_every == 0 and processes.any_of(interrupt.requested is not None)
