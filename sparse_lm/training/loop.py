"""The training loop: dense steps, sparse steps, and the transitions between them.

The loop dispatches step n and then handles the metrics of step n - 1, so that the device always has work.
"""

from __future__ import annotations

import dataclasses

import jax

from sparse_lm.config import Config
from sparse_lm.data.dataset import Data
from sparse_lm.data.pipeline import heldout_batches
from sparse_lm.errors import UserError
from sparse_lm.training.checkpoints.checkpoint import Checkpoints
from sparse_lm.training.compilation import compile_programs, programs_from
from sparse_lm.training.environment import check_implementation, check_precision
from sparse_lm.training.evaluation import Evaluation
from sparse_lm.training.interrupt import Interrupt
from sparse_lm.training.mesh import processes
from sparse_lm.training.run_data import device_batches, open_data_together
from sparse_lm.training.starting import open_checkpoints, open_pretrained, restore_or_start
from sparse_lm.training.step import Metrics, Trainer, TrainState, make_trainer
from sparse_lm.training.telemetry.overview import print_overview
from sparse_lm.training.telemetry.profile import StepProfile
from sparse_lm.training.telemetry.step_log import StepLog
from sparse_lm.training.telemetry.summary import RunSummary
from sparse_lm.training.transitions import make_transitions, transition_before
from sparse_lm.training.workdir import check_same_config, save_config, workdir_lock

_LINES = {"enter": "entering the sparse phase", "leave": "leaving the sparse phase", "refresh": "refresh"}


class TooManyBadSteps(UserError):
    """Loss or gradient was not finite for too many steps in a row."""


def train(config: Config, workdir: str, profiled: range = range(0), wandb: bool = False) -> bool:
    """Trains to the end, going on from the newest checkpoint in `workdir` if there is one.

    Steps in `profiled` are traced (`StepProfile`). With `wandb` metrics go to Weights & Biases, too.

    Returns:
      True if the run is finished; False if a signal stopped it early (its state is saved).

    Raises:
      ConfigError, WorkdirError, DataError, WandbError, LaunchError: before anything compiles.
      TooManyBadSteps: the state, which bad steps do not change, is saved.
      DataError: later, too, if a window cannot be read; checkpoints stay as they are.
      WorkdirError: later, too, if a file cannot be written; the run goes on from its newest checkpoint.
    """
    check_implementation(config.sparsity.recipe)
    check_precision(config.model.precision)
    config, pretrained = open_pretrained(config, workdir)
    with workdir_lock(workdir), processes.reports_directory(workdir) as reports, RunSummary(reports, config) as summary:
        changes = check_same_config(workdir, config)
        trainer = make_trainer(config)  # refuses a mesh of other devices, while nothing but the lock is written
        processes.wait_for_all("configurations are checked")
        data = open_data_together(workdir, config)
        with open_checkpoints(workdir, config) as checkpoints, Interrupt() as interrupt:
            state = restore_or_start(trainer, checkpoints, pretrained)
            start = int(state.step)
            if start >= config.steps:
                if (bad := int(state.skipped_in_a_row)) >= config.optimizer.max_skipped_steps:
                    raise TooManyBadSteps(f"{workdir}: at its end, and the last {bad} of its {start} steps were bad")
                print(f"{workdir}: this run is finished, {start} steps")
                return True
            print_overview(config, workdir, trainer, data, state, changes)
            with (
                StepLog(config, reports, summary, start, wandb and processes.is_leader()) as log,
                StepProfile(reports, profiled, start) as profile,
            ):
                return Loop(config, workdir, trainer, data, checkpoints, interrupt, profile, log).run(state, start)


@dataclasses.dataclass
class Loop:
    """The loop of one process, with what it works with."""

    config: Config
    workdir: str
    trainer: Trainer
    data: Data
    checkpoints: Checkpoints
    interrupt: Interrupt
    profile: StepProfile
    log: StepLog
    pending: tuple[int, Metrics] | None = None  # a step that is dispatched and not yet handled

    def __post_init__(self):
        config, trainer = self.config, self.trainer
        self.transitions = make_transitions(config, trainer.graphdef, trainer.layout)
        options = config, trainer.graphdef, self.data.bytes_per_token
        self.evaluations = {
            phase: Evaluation(*options, config.recipe(phase), trainer.layout) for phase in ("dense", "sparse")
        }

    def run(self, state: TrainState, start: int) -> bool:
        """Trains from step `start` to the end; see `train` for what is returned and raised."""
        config = self.config
        batches = device_batches(self.data, config, self.trainer.layout, start)
        for step in range(start, config.steps):
            if self._is_to_stop(step):
                self._handle_pending(state)
                return self._stop(state, step)
            windows = next(batches)
            if step == start:
                programs = programs_from(step, config, self.trainer, self.transitions, self.evaluations)
                compile_programs(programs, state, windows, step, self.log)
                save_config(self.workdir, config)
            done, last = step + 1, step + 1 == config.steps
            transition = transition_before(config, step)
            profile_turns = self.profile.turns(step)
            # No transition is timed with it, and if it is one bad step too many, the last step is not taken.
            if profile_turns or transition in ("enter", "leave") or last:
                self._handle_pending(state)
            if profile_turns:
                self.profile.turn()
                self.log.summary.spent_on("profile")
            transition_metrics: Metrics = {}
            if transition:
                self.log.progress.note(step, _LINES[transition])
                state, transition_metrics = self.transitions[transition](state, windows)
                if transition_metrics:
                    self.log.told.add(step)
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, metrics = self.trainer.steps[config.phase(step)](state, windows)
            # Now that the device has this step to work on, handle the one before.
            self._handle_pending(state, dispatched=(step, transition_metrics | metrics))
            evaluates, saves = (last or done % every == 0 for every in (config.eval_every, config.checkpoint_every))
            if last and config.phase(step) == "sparse" and config.sparsity.leave:
                state, _ = self.transitions["leave"](state, windows)
            if evaluates or saves:
                results = self._handle_pending(state, evaluates)
            if saves:
                self._save(state, done, results)
        self.checkpoints.wait()
        self.log.summary.state = "finished"
        return True

    def _is_to_stop(self, step: int) -> bool:
        """Returns True if a signal asks to end the run before `step`.

        Several processes ask each other, which waits for the device, so that they do it every `log_every` steps only.
        """
        asks = jax.process_count() == 1 or step % self.config.log_every == 0
        return asks and processes.any_of(self.interrupt.requested is not None)

    def _handle_pending(
        self, state: TrainState, evaluates: bool = False, dispatched: tuple[int, Metrics] | None = None
    ) -> dict[str, float] | None:
        """Waits for the pending step and writes its metrics, with an evaluation of `state` if asked for.

        From then on `dispatched`, the step after it, is pending.
        """
        pending, self.pending = self.pending, dispatched
        if pending is None:
            return None
        step, metrics = pending
        bad_in_a_row = self.log.settle(step, metrics)
        too_many = bad_in_a_row >= self.config.optimizer.max_skipped_steps
        results = self._evaluate(state, step) if evaluates and not too_many else None
        self.log.write(step, metrics, results)
        if too_many:
            if self.pending:  # the state has this step, too
                self.log.settle(*self.pending)
                self.log.write(*self.pending)
            self._save(state, int(state.step))
            self.checkpoints.wait()
            raise TooManyBadSteps(
                f"loss or gradient was not finite in {bad_in_a_row} steps in a row, "
                f"up to step {step + 1}; they changed nothing, and the state is saved in {self.workdir}"
            )
        return results

    def _evaluate(self, state: TrainState, step: int) -> dict[str, float]:
        """Evaluates the state after `step` on `data.eval_windows` held-out windows."""
        evaluate = self.evaluations[self.config.phase_after(step + 1)]
        batches = heldout_batches(self.data, batch_size=evaluate.batch_size, windows=self.config.data.eval_windows)
        self.log.progress.move(step + 1, "evaluating")
        results = evaluate(state.params, state.recipe_state, batches)
        self.log.summary.spent_on("evaluation")
        return results

    def _save(self, state: TrainState, step: int, results: dict[str, float] | None = None) -> None:
        self.log.summary.write()  # first, so that no checkpoint is ahead of it
        self.checkpoints.save(step, state, results["loss"] if results and self.config.can_be_best(step) else None)
        self.log.progress.note(step, "saving")
        self.log.summary.spent_on("checkpoint")

    def _stop(self, state: TrainState, step: int) -> bool:
        """Saves the state after `step` steps and says that a signal ended the run; returns False."""
        if step:
            self._save(state, step)
            self.checkpoints.wait()
        signal = self.interrupt.requested or "a signal to another process"
        self.log.summary.state = f"stopped by {signal}"
        self.log.progress.note(step, f"stopped by {signal}{', saved' if step else ''}; the same command goes on")
        return False
