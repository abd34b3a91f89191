"""Checkpoints of a run's state.

    checkpoints/<step>/params      nested dicts of arrays, all that a forward pass needs
    checkpoints/<step>/recipe_state what the sparse FFN reads and does not train (absent if nothing)
    checkpoints/<step>/state       the rest of the training state: optimizer, counters
    checkpoints/<step>/manifest    JSON: the run's model and recipe, metrics, each array's shape and checksums
    checkpoints/<step>.damaged     one that a resumed run found damaged; it went on from the one before

Arrays are named by their path in the state, so that a checkpoint is read without the classes that wrote it, and one
that does not fit is refused by name. A step is written to a temporary directory and renamed when it is whole.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict

from sparse_lm.errors import WorkdirError
from sparse_lm.training.checkpoints import saved_checkpoint as saved
from sparse_lm.training.checkpoints.saved_checkpoint import DamagedCheckpoint, SavedCheckpoint, saved_checkpoints
from sparse_lm.training.mesh import processes

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Checkpoints(contextlib.AbstractContextManager):
    """The checkpoints of a run in training: the newest `keep`, the one of least eval_loss, and some more.

    Those after multiples of `every` steps stay, if it is not 0.

    Saves are asynchronous: the state is written behind the next steps, and its buffers may be donated as soon as `save`
    returns. If that fails, as on a full disk, `wait`, the next `save` or the end of the context raises WorkdirError;
    the checkpoints before it stay. `run` says what the arrays mean, by configuration key: a checkpoint that says
    otherwise is refused.
    """

    def __init__(self, workdir: str | os.PathLike, keep: int, *, every: int = 0, run: Mapping[str, Any] | None = None):
        self._workdir, self._run = workdir, run or {}
        self._eval_losses: dict[int, float] = {}
        for step, checkpoint in saved_checkpoints(workdir).items():
            with contextlib.suppress(DamagedCheckpoint):  # `restore_latest` says so
                self._eval_losses[step] = checkpoint.eval_loss
        self._saving: int | None = None  # the last step given to `save`
        policies = [ocp.checkpoint_managers.LatestN(keep), _Best(self._eval_losses)]
        if every:
            policies.append(ocp.checkpoint_managers.EveryNSteps(every))
        handlers = {item: ocp.StandardCheckpointHandler() for item in saved.ITEMS}
        self._manager = ocp.CheckpointManager(
            Path(workdir, "checkpoints").absolute(),
            item_handlers=handlers | {saved.MANIFEST: ocp.JsonCheckpointHandler(filename=saved.MANIFEST_FILE)},
            options=ocp.CheckpointManagerOptions(
                create=True,
                cleanup_tmp_directories=True,
                preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
            ),
        )

    def save(self, step: int, state: Any, eval_loss: float | None = None) -> None:
        """Starts to save the state after `step` steps; does nothing if that step is saved already.

        `state` is a pytree of arrays with attributes or keys `params` and `recipe_state` among others.
        """
        self.wait()
        if step == self._manager.latest_step():
            return
        arrays = saved.arrays_by_path(state)
        manifest = saved.make_manifest(step, arrays, self._run, eval_loss)
        items = {item: ocp.args.StandardSave(tree) for item, tree in unflatten_dict(arrays).items()}
        items[saved.MANIFEST] = ocp.args.JsonSave(manifest)
        self._eval_losses[step] = saved.eval_loss(manifest)
        self._saving = step
        with self._failure_named():
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)  # whether to save is decided

    def restore_latest(self, abstract_state: Any) -> Any | None:
        """Restores the newest checkpoint's state, bit for bit; None if there is none.

        In place of a damaged one, which the log names, the one before it is taken. Once that has proved whole, the
        damaged one is renamed, so that the run can save its step again.

        `abstract_state` is what `save` is given, as arrays or `jax.ShapeDtypeStruct`s. An entry with a sharding is
        restored to it, others to the default device.

        Raises:
          WorkdirError: every checkpoint is damaged, or the newest that is not is of another run, or has
            an array that is missing, unexpected, or of another shape or dtype.
        """
        wanted = saved.arrays_by_path(abstract_state)

        def read(checkpoint: SavedCheckpoint) -> Any:
            checkpoint.check_run(self._run)
            checkpoint.check_fits(wanted)
            restored = checkpoint.restore(wanted)
            return jax.tree.unflatten(jax.tree.structure(abstract_state), [restored[path] for path in wanted])

        checkpoints = saved_checkpoints(self._workdir)
        if not checkpoints:
            return None
        state, step = _newest_whole(self._workdir, checkpoints, read)
        self._set_aside([later for later in checkpoints if later > step])
        return state

    def wait(self) -> None:
        """Returns when the last save is whole on disk; raises WorkdirError if it could not be written."""
        with self._failure_named():
            self._manager.wait_until_finished()

    def __exit__(self, *_: object) -> None:
        with self._failure_named():
            self._manager.close()

    @contextlib.contextmanager
    def _failure_named(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # a full disk is the one in Python and the other in TensorStore
            reason = f"checkpoint {self._saving} could not be saved: {saved.first_line(error)}"
            raise WorkdirError(self._workdir, reason) from error

    def _set_aside(self, damaged: Iterable[int]) -> None:
        for step in damaged:
            aside = self._manager.directory / f"{step}.damaged"
            if processes.is_leader():
                shutil.rmtree(aside, ignore_errors=True)
                (self._manager.directory / str(step)).rename(aside)
            _log.warning("the damaged checkpoint %d is now %s", step, aside)
        processes.wait_for_all("damaged checkpoints are set aside")
        self._manager.reload()


def restore_params(
    workdir: str | os.PathLike, step: int | str = "latest", run: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Reads parameters and the recipe's state of a checkpoint, from the workdir alone.

    The run may still be training. `step` is a step, "best" (least eval_loss of those that `Config.can_be_best`, which
    damage to any manifest leaves unknown) or "latest", the newest that is not damaged; see `Checkpoints` for `run`.

    Returns:
      params: nested dicts of arrays, on the default device.
      recipe_state: dict of arrays by name; those that the recipe does not have are absent.
      step: of the checkpoint.

    Raises:
      WorkdirError: there is no such checkpoint, it is damaged, or it is of another run.
    """

    def read(checkpoint: SavedCheckpoint) -> dict[str, Any]:
        checkpoint.check_run(run or {})
        wanted = {path: array for path, array in checkpoint.arrays.items() if path[0] in ("params", "recipe_state")}
        return unflatten_dict(checkpoint.restore(wanted))

    checkpoints = saved_checkpoints(workdir)
    if not checkpoints:
        raise WorkdirError(workdir, "holds no checkpoint")
    if step == "best":
        step = min(checkpoints, key=lambda step: checkpoints[step].eval_loss)
        if checkpoints[step].eval_loss == math.inf:
            raise WorkdirError(workdir, "no checkpoint was evaluated after any sparse phase, so that none is best")
    if step == "latest":
        restored, step = _newest_whole(workdir, checkpoints, read)
    elif (step := int(step)) in checkpoints:
        restored = read(checkpoints[step])
    else:
        raise WorkdirError(workdir, f"no checkpoint of step {step}, only of {', '.join(map(str, checkpoints))}")
    return restored["params"], restored.get("recipe_state", {}), step


def _newest_whole(
    workdir: str | os.PathLike, checkpoints: Mapping[int, SavedCheckpoint], read: Callable[[SavedCheckpoint], _T]
) -> tuple[_T, int]:
    """Applies `read` to the newest checkpoint that is not damaged; returns the result and its step."""
    newest = max(checkpoints)
    for step in sorted(checkpoints, reverse=True):
        try:
            result = read(checkpoints[step])
        except DamagedCheckpoint as error:
            _log.error("%s", error)
            continue
        if step != newest:
            _log.warning("using checkpoint %d instead of %d", step, newest)
        return result, step
    raise WorkdirError(workdir, f"all of its checkpoints are damaged: {', '.join(map(str, checkpoints))}")


class _Best:
    """Orbax's policy that keeps the checkpoint of least eval_loss, if any was evaluated."""

    def __init__(self, eval_losses: Mapping[int, float]):
        self._eval_losses = eval_losses

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        losses = [self._eval_losses.get(checkpoint.step, math.inf) for checkpoint in checkpoints]
        return [loss == min(losses) < math.inf for loss in losses]
