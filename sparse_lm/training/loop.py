"""The training loop: dense steps, sparse steps, and what happens between them."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sparse_lm.config import Config
from sparse_lm.data.dataset import Data
from sparse_lm.data.pipeline import heldout_batches, train_batches
from sparse_lm.interop.pretrained import Pretrained
from sparse_lm.model.llama import Params
from sparse_lm.ops import backends
from sparse_lm.ops.plan import DENSE
from sparse_lm.progress import Progress, show_speed, show_time_left
from sparse_lm.training.checkpoints.checkpoint import Checkpoints
from sparse_lm.training.decay_search import TRIAL_STEPS, search_mask_decay
from sparse_lm.training.determinism import check_determinism
from sparse_lm.training.evaluation import make_evaluation
from sparse_lm.training.interrupt import Interrupt
from sparse_lm.training.mesh import processes
from sparse_lm.training.mesh.layout import Layout, row_share
from sparse_lm.training.recipe import check_implementation
from sparse_lm.training.run_data import check_same_data, open_run_data, save_data, with_tokenizer_of_run
from sparse_lm.training.schedule import learning_rate
from sparse_lm.training.step import Metrics, Trainer, TrainState, make_trainer
from sparse_lm.training.telemetry import flops
from sparse_lm.training.telemetry.metrics import MetricsWriter
from sparse_lm.training.telemetry.profile import StepProfile
from sparse_lm.training.telemetry.summary import RunSummary
from sparse_lm.training.telemetry.timing import StepTimer
from sparse_lm.training.telemetry.wandb_run import WandbRun
from sparse_lm.training.transitions import make_transitions, needs_refresh
from sparse_lm.training.validity import check_variables
from sparse_lm.training.weight_metrics import WeightMetrics
from sparse_lm.training.workdir import check_same_config, has_saved, make_workdir, meaning, save_config

_log = logging.getLogger(__name__)


class TooManyBadSteps(RuntimeError):
    """Loss or gradient was not finite, or the loss a spike, for too many steps in a row."""


def train(config: Config, workdir: str, profile_steps: tuple[int, int] = (0, 0), wandb: bool = False) -> bool:
    """Trains to the end, going on from the newest checkpoint in `workdir` if there is one.

    Args:
      config: the run.
      workdir: its directory.
      profile_steps: (first, end), steps to trace into `<workdir>/profile`; see `StepProfile`.
      wandb: whether to send the metrics to Weights & Biases, too; see `WandbRun`.

    Returns:
      Whether the run is finished; False if a signal stopped it early (its state is saved).

    Raises:
      ConfigError, WorkdirError, DataError, WandbError, LaunchError: before anything compiles.
      TooManyBadSteps: the state, which bad steps do not change, is saved.
      DataError: later, too, if a window cannot be read; checkpoints stay as they are.
      WorkdirError: at the end, too, if the last checkpoint could not be written.
    """
    check_determinism(config)
    check_implementation(config.sparsity)
    pretrained = None
    if config.init_from and has_saved(workdir):  # which goes on from its checkpoint: the model may be gone
        config = with_tokenizer_of_run(workdir, config)
    elif config.init_from:
        pretrained = Pretrained(config)
        config = pretrained.config_with_tokenizer()
    make_workdir(workdir)
    check_same_config(workdir, config)
    with processes.reports_directory(workdir) as reports:
        return _train(config, workdir, reports, pretrained, profile_steps, wandb)


def _train(
    config: Config,
    workdir: str,
    reports: str,
    pretrained: Pretrained | None,
    profile_steps: tuple[int, int],
    wandb: bool,
) -> bool:
    summary = RunSummary(reports, config)
    trainer = make_trainer(config)  # which refuses a mesh that there are no devices for, while nothing is written
    processes.wait_for_all("configurations are checked")
    if not processes.is_leader():
        processes.wait_for_all("data is prepared")
    data = open_run_data(workdir, config)
    if processes.is_leader():
        check_same_data(workdir, config, data)
        save_config(workdir, config)
        save_data(workdir, data)
        processes.wait_for_all("data is prepared")
    processes.check_data(data.info)
    _log.info(data.describe())

    with (
        summary,
        Checkpoints(workdir, config.keep_checkpoints, meaning(config)) as checkpoints,
        Interrupt() as interrupt,
    ):
        state = checkpoints.restore_latest(
            trainer.abstract_state(), lambda state: check_variables(state.variables, config, int(state.step))
        )
        if state is None:
            state = trainer.init()
            if pretrained:
                state = dataclasses.replace(state, params=_place(pretrained.params(), trainer.layout))
        profile = StepProfile(reports, *profile_steps)
        return _Run(config, workdir, reports, trainer, data, checkpoints, interrupt, profile, summary, wandb).go(state)


def _place(params: Params, layout: Layout | None) -> Params:
    return jax.device_put(params, layout.state.params) if layout else jax.tree.map(jnp.array, params)


class _Run:
    """One process's part of a run."""

    def __init__(
        self,
        config: Config,
        workdir: str,
        reports: str,
        trainer: Trainer,
        data: Data,
        checkpoints: Checkpoints,
        interrupt: Interrupt,
        profile: StepProfile,
        summary: RunSummary,
        wandb: bool,
    ):
        self.config, self.trainer, self.data = config, trainer, data
        self.checkpoints, self.interrupt, self.profile, self.workdir = checkpoints, interrupt, profile, workdir
        self.reports, self.summary, self.wandb = reports, summary, wandb and processes.is_leader()
        self.transitions = make_transitions(config, trainer.plan, trainer.graphdef, trainer.layout)
        self.plans = {"dense": DENSE, "sparse": trainer.plan}  # by phase
        self.evaluations = {
            phase: make_evaluation(config, trainer.graphdef, data.bytes_per_token, plan, trainer.layout)
            for phase, plan in self.plans.items()
        }
        soft = trainer.plan.weights == "soft_threshold"
        dense_layers = config.sparsity.dense_layers
        self.weight_metrics = WeightMetrics(trainer.plan, dense_layers, trainer.layout) if soft else None
        self.device_kind = jax.devices()[0].device_kind
        self.schedule = learning_rate(config)
        self.compiled: set[str] = set()  # phases
        self.pending: tuple[int, Metrics] | None = None  # a step that is dispatched and not yet looked at

    def go(self, state: TrainState) -> bool:
        """Trains from `state` on; see `train` for what is returned and raised."""
        config, start = self.config, int(state.step)
        if start >= config.steps:
            print(f"{self.workdir}: this run is finished, {start} steps")
            return True
        if start:
            print(f"{self.workdir}: going on from step {start}")
        self._print_implementations(state)
        float(self.schedule(start))  # compiles, which is no step's time
        self.timer = StepTimer(config, start)
        self.progress = Progress("step", config.steps, start)
        wandb_run = WandbRun(self.reports, config) if self.wandb else None
        with MetricsWriter(self.reports, start, wandb_run) as self.writer:
            self.summary.begin(start)
            try:
                return self._steps(state, start)
            finally:
                self.profile.close()
                self.progress.close()

    def _steps(self, state: TrainState, start: int) -> bool:
        config = self.config
        batches = self._batches(start)
        for step in range(start, config.steps):
            if self._is_to_stop(step):
                self._finish_pending(state)
                self._stop(state, step)
                return False
            windows = next(batches)
            profile_turns = self.profile.turns(step)
            if profile_turns or config.phase(step) != config.phase(step - 1):
                self._finish_pending(state)  # or it would seem to take as long as the next phase compiles
            if not self._compile(step, state, windows):
                self._stop(state, step)
                return False
            if profile_turns:
                self.profile.turn()
                self.timer.skip()
                self.summary.spent_on("profile")
            state, edge_metrics = self._cross_edge(state, step, windows)
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, metrics = self._step(step, state, windows)
            before, self.pending = self.pending, (step, edge_metrics | metrics)
            self._finish(before, state)  # by now the device has the next step to work on

            done = step + 1
            last = done == config.steps
            evaluates = last or done % config.eval_every == 0
            saves = last or done % config.checkpoint_every == 0
            if not (evaluates or saves):
                continue
            if last and config.phase(step) == "sparse":
                state = self.transitions.leave_sparse(state)
            results = self._finish_pending(state, evaluates=evaluates)
            if saves:
                self._save(state, done, results)
            self.timer.skip()
        self.checkpoints.wait()
        self.summary.state = "finished"
        print(f"held-out loss {results['loss']:.4f} nats per token, {results['bits_per_byte']:.4f} bits per byte")
        return True

    def _compile(self, step: int, state: TrainState, windows: Array) -> bool:
        """Compiles what a phase that begins needs, which takes minutes; False if a signal came first.

        It is compiled before the state crosses the edge, and so the state can be saved. Processes of several wait
        for their compilations: they could not agree on what to do instead.
        """
        phase = self.config.phase(step)
        if phase in self.compiled:
            return True
        self.compiled.add(phase)
        programs = [self.trainer.step(phase)]
        if phase == "sparse":
            edges = {"enter": self.transitions.enter_sparse, "refresh": self.transitions.refresh}
            coming = {self._edge_before(later) for later in range(step, self.config.steps)}
            programs += [program for edge, program in edges.items() if edge in coming]

        def compile_all() -> None:
            for program in programs:
                program.lower(state, windows).compile()
            if phase == "sparse":  # which ends some time
                self.transitions.leave_sparse.lower(state).compile()

        if jax.process_count() > 1:
            compile_all()
            return True
        return self.interrupt.wait_for(compile_all)

    def _step(self, step: int, state: TrainState, windows: Array) -> tuple[TrainState, Metrics]:
        """One step; if it is one to log, with what it did to the pattern of 2:4 weights."""
        train_step = self.trainer.step(self.config.phase(step))
        if self.weight_metrics is None or step % self.config.log_every:
            return train_step(state, windows)
        patterns = self.weight_metrics.before(state)
        state, metrics = train_step(state, windows)
        return state, metrics | self.weight_metrics.after(patterns, state)

    def _is_to_stop(self, step: int) -> bool:
        """Several processes ask each other, which waits for the device, every `log_every` steps only."""
        if jax.process_count() == 1:
            return self.interrupt.requested is not None
        return step % self.config.log_every == 0 and processes.any_of(self.interrupt.requested is not None)

    def _stop(self, state: TrainState, step: int) -> None:
        """Saves the state after `step` steps, before a request to end the run is obeyed."""
        if step:
            self._save(state, step)
            self.checkpoints.wait()
        signal = self.interrupt.requested or "a signal to another process"
        self.summary.state = f"stopped by {signal}"
        saved = ", saved" if step else ""
        print(f"stopped by {signal} after step {step}{saved}; the same command goes on")

    def _batches(self, start: int) -> Iterator[Array]:
        """Batches from step `start` on, on the devices."""
        layout, rows = self.trainer.layout, self.config.batch_size
        index, count = row_share(layout.batch, rows) if layout else (0, 1)
        share = dict(process_index=index, process_count=count)
        batches = train_batches(self.data, batch_size=rows, seed=self.config.seed, start_step=start, **share)
        place = layout.place_rows if layout else jax.device_put
        return (place(windows) for windows in batches)

    def _edge_before(self, step: int) -> str | None:
        """What happens to the state before `step`: "enter" or "leave" the sparse phase, "refresh", or nothing."""
        now, before = self.config.phase(step), self.config.phase(step - 1) if step else "dense"
        if now != before:
            return "enter" if now == "sparse" else "leave"
        return "refresh" if needs_refresh(self.config, step) else None

    def _cross_edge(self, state: TrainState, step: int, windows: Array) -> tuple[TrainState, Metrics]:
        """The state as `step` needs it, and a refresh's metrics."""
        match self._edge_before(step):
            case "enter":
                state = self.transitions.enter_sparse(state, windows)
                if self.trainer.plan.weights == "transposable":
                    state = self._set_mask_decay(state, step)
            case "leave":
                state = self.transitions.leave_sparse(state)
            case "refresh":
                return self.transitions.refresh(state, windows)
        return state, {}

    def _set_mask_decay(self, state: TrainState, step: int) -> TrainState:
        factor = self.config.sparsity.mask_decay
        if factor is None:
            trial = self._batches(step)
            batches = itertools.islice(trial, min(self.config.sparsity.refresh_every, TRIAL_STEPS))
            factor = search_mask_decay(state, batches, self.trainer.sparse_step, self.trainer.dense_step)
            print(f"step {step}: masked decay {factor:g}, by flip rate")
        return dataclasses.replace(state, mask_decay=jnp.full_like(state.mask_decay, factor))

    def _evaluate(self, state: TrainState, step: int) -> dict[str, float]:
        """Held-out loss of the state after `step`, computed as that step was."""
        left = step + 1 == self.config.steps  # a finished run has dense weights, whatever its last phase
        phase = "dense" if left else self.config.phase(step)
        batches = heldout_batches(self.data, batch_size=self.config.batch_size, windows=self.config.data.eval_windows)
        results = self.evaluations[phase](state.params, state.variables, batches)
        self.summary.spent_on("evaluation")
        return results

    def _save(self, state: TrainState, step: int, results: dict[str, float] | None = None) -> None:
        self.summary.write()  # first, so that no checkpoint is ahead of it
        self.checkpoints.save(step, state, {"eval_loss": results["loss"]} if results else None)
        self.summary.spent_on("checkpoint")

    def _finish_pending(self, state: TrainState, *, evaluates: bool = False) -> dict[str, float] | None:
        """Waits for the dispatched step, if there is one, and reports it; on request with an evaluation, returned."""
        pending, self.pending = self.pending, None
        return self._finish(pending, state, evaluates=evaluates)

    def _finish(
        self, dispatched: tuple[int, Metrics] | None, state: TrainState, *, evaluates: bool = False
    ) -> dict[str, float] | None:
        if dispatched is None:
            return None
        step, metrics = dispatched
        bad_in_a_row = self._settle(step, metrics)
        too_many = bad_in_a_row >= self.config.optimizer.max_skipped_steps
        results = self._evaluate(state, step) if evaluates and not too_many else None
        self._report(step, metrics, results)
        if too_many:
            self._give_up(state, step, bad_in_a_row)
        return results

    def _settle(self, step: int, metrics: Metrics) -> int:
        """Waits for a step; how many have been bad in a row."""
        bad_in_a_row = int(metrics["skipped_in_a_row"])
        self.timer.step_done(self.config.phase(step))
        self.summary.step_done(self.config.phase(step))
        return bad_in_a_row

    def _give_up(self, state: TrainState, step: int, bad_in_a_row: int) -> None:
        """Saves the state, in which the step dispatched behind the last bad one is, and ends the run."""
        if self.pending:
            (behind, metrics), self.pending = self.pending, None
            self._settle(behind, metrics)
            self._report(behind, metrics)
        self._save(state, int(state.step))
        self.checkpoints.wait()
        raise TooManyBadSteps(
            f"loss or gradient was not finite, or the loss a spike, in {bad_in_a_row} steps in a row, "
            f"up to step {step}; they changed nothing, and the state is saved in {self.workdir}"
        )

    def _report(self, step: int, metrics: Metrics, results: dict[str, float] | None = None) -> None:
        """Writes and shows the metrics of a settled step, if it is one to log."""
        config, phase = self.config, self.config.phase(step)
        loss, skipped_before = float(metrics["loss"]), int(metrics["skipped"])
        if int(metrics["skipped_in_a_row"]):
            skipped_before -= 1
            _log.warning("step %d skipped: loss %s, gradient norm %s", step, loss, float(metrics["grad_norm"]))
        if step % config.log_every and not results:
            return
        step_time = self.timer.lap()
        speed = config.tokens_per_step / step_time if step_time else None
        line = {
            "phase": phase,
            "learning_rate": float(self.schedule(step - skipped_before)),  # a skipped step does not count in Optax
            "tokens": (step + 1) * config.tokens_per_step,
            "tokens_per_second": speed,
            "step_time": step_time,
            "wall_time": self.summary.wall_time(),
            **flops.utilisation(config, self.plans[phase], speed, self.device_kind),
            **metrics,
        }
        if results:
            line |= {f"eval_{name}": value for name, value in results.items()}
        self.summary.logged(self.writer.write(step, line))
        left = show_time_left(self.timer.seconds_left())
        self.progress.update(step + 1, phase, f"loss {loss:.4f}", show_speed(speed), left)

    def _print_implementations(self, state: TrainState) -> None:
        """Which product is sparse, and which backend runs each operation."""
        if not self.config.sparsity.windows:
            return
        windows = jax.ShapeDtypeStruct((self.config.batch_size, self.config.seq_len + 1), np.int32)
        with backends.record() as used:
            jax.eval_shape(self.trainer.sparse_step, state, windows)
        print("sparse phase:")
        for product, operand in self.trainer.plan.operands.items():
            print(f"  {product:<18} {operand}")
        if self.config.sparsity.dense_layers:
            print(f"  {'dense':<18} FFNs of the first {self.config.sparsity.dense_layers} layers")
        print("implementations:")
        width = max(map(len, used), default=0)  # none if this process has traced the step before
        for op, names in sorted(used.items()):
            print(f"  {op:<{width}} {', '.join(sorted(names))}")
