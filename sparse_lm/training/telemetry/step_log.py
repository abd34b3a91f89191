"""Writes all that a process tells of its steps: metrics, progress, timing and summary."""

from __future__ import annotations

import contextlib
import logging
import statistics

import jax

from sparse_lm.config import Config
from sparse_lm.progress import Progress, show_time_left
from sparse_lm.training.optimizer import learning_rate
from sparse_lm.training.step import Metrics
from sparse_lm.training.telemetry import flops
from sparse_lm.training.telemetry.metrics import MetricsWriter
from sparse_lm.training.telemetry.summary import RunSummary
from sparse_lm.training.telemetry.wandb_run import open_run

_log = logging.getLogger(__name__)


class StepLog(contextlib.AbstractContextManager):
    """Times the steps of this process and writes their metrics. Use it as a context manager.

    The first step of a phase is not timed, because it waits for the transition before it. `directory` is where this
    process writes (`processes.reports_directory`), `start` its first step. `progress` counts the steps done.
    """

    def __init__(self, config: Config, directory: str, summary: RunSummary, start: int, wandb: bool = False):
        self._config, self.summary = config, summary
        self._device_kind = jax.devices()[0].device_kind
        self._schedule = learning_rate(config)
        float(self._schedule(start))  # compiles, which is no step's time
        self._writer = MetricsWriter(directory, start, open_run(directory, config) if wandb else None)
        self.progress = Progress("step", config.steps, start)
        self._phase: str | None = None  # of the step before
        self._times: list[float] = []  # of the steps since the last line, in the same phase
        self._step_times: dict[str, float] = {}  # by phase, as last written
        self.told: set[int] = set()  # steps to log besides, of whose transitions there are metrics
        summary.begin(start)

    def settle(self, step: int, metrics: Metrics) -> int:
        """Waits for a step and counts its time; returns how many steps in a row have been skipped."""
        skipped_in_a_row, phase = int(metrics["skipped_in_a_row"]), self._config.phase(step)
        seconds = self.summary.step_done(phase)
        if phase == self._phase:
            self._times.append(seconds)
        else:
            self._times.clear()
        self._phase = phase
        self.progress.move(step + 1)
        return skipped_in_a_row

    def write(self, step: int, metrics: Metrics, results: dict[str, float] | None = None) -> None:
        """Writes and shows a settled step, if it is one to log, or has held-out results or metrics of a transition."""
        config, phase = self._config, self._config.phase(step)
        loss, skipped_before = float(metrics["loss"]), int(metrics["skipped"])
        if int(metrics["skipped_in_a_row"]):
            skipped_before -= 1
            _log.warning("step %d skipped: loss %s, gradient norm %s", step + 1, loss, float(metrics["grad_norm"]))
        if step % config.log_every and not results and step not in self.told:
            return
        step_time, speed = None, None
        if self._times:
            step_time = self._step_times[phase] = statistics.fmean(self._times)
            speed = config.tokens_per_step / step_time if step_time else None
            self._times.clear()
        line = {
            "phase": phase,
            "learning_rate": float(self._schedule(step - skipped_before)),  # Optax does not count skipped steps
            "tokens": (step + 1) * config.tokens_per_step,
            "tokens_per_second": speed,
            "step_time": step_time,
            "wall_time": self.summary.wall_time(),
            "memory": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
            **flops.utilisation(config, config.recipe(phase), speed, self._device_kind),
            **metrics,
            **{f"eval_{name}": value for name, value in (results or {}).items()},
        }
        self.summary.logged(self._writer.write(step, line))
        if results:
            loss_, bits = results["loss"], results["bits_per_byte"]
            self.progress.note(step + 1, f"held-out loss {loss_:.4f} nats per token, {bits:.4f} bits per byte")
        shown_speed = "- tokens/s" if speed is None else f"{speed:,.0f} tokens/s"
        left = show_time_left(self._seconds_left(step + 1))
        self.progress.update(step + 1, phase, f"loss {loss:.4f}", shown_speed, left)

    def _seconds_left(self, done: int) -> float | None:
        """Estimates what is left of training, without evaluations and saves; None before the first timed step.

        Steps of a phase take as long as in its last line; those of one without a line, as long as the others.
        """
        if not self._step_times:
            return None
        sparse, mean = self._config.sparsity.phase, statistics.fmean(self._step_times.values())
        of_sparse = len(range(max(done, sparse.start), sparse.stop))
        left = {"sparse": of_sparse, "dense": self._config.steps - done - of_sparse}
        return sum(steps * self._step_times.get(phase, mean) for phase, steps in left.items())

    def __exit__(self, *error: object) -> None:
        self.progress.close()
        self._writer.__exit__(*error)
