"""Checkpoints of a run's state.

    checkpoints/<step>/params      nested dicts of arrays, all that a forward pass needs
    checkpoints/<step>/recipe_state what the sparse FFN reads and does not train (absent if nothing)
    checkpoints/<step>/state       the rest of the training state: optimizer, counters
    checkpoints/<step>/manifest    JSON: the run's model and recipe, metrics, each array's shape and checksums
    checkpoints/<step>.damaged     one that a resumed run found damaged; it went on from the one before

Arrays are named by their path in the state, so that a checkpoint is read without the classes that
wrote it, and one that does not fit is refused by name. The matrices of all layers are one array, of
which each layer is a chunk on disk and can be read alone. A step is written to a temporary directory
and renamed when it is whole, and renamed again before it is deleted: a kill leaves only whole ones.
What happens to them on the disk, checksums tell.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict
from jax.experimental import multihost_utils

from sparse_lm.training.checkpoints.manifest import ArrayPath, Manifest, describe
from sparse_lm.training.checkpoints.saved_checkpoint import (
    MANIFEST,
    DamagedCheckpoint,
    SavedArray,
    SavedCheckpoint,
    arrays_by_path,
    first_line,
    make_manager,
)
from sparse_lm.training.workdir import WorkdirError

_log = logging.getLogger(__name__)

_TRASH = ".deleted"  # beside the steps
_SAVE_ERRORS = (OSError, ValueError)  # a full disk is the one in Python and the other in TensorStore

_T = TypeVar("_T")


class Checkpoints:
    """The checkpoints of a run in training: the newest `keep`, and the one of least eval_loss.

    Saves are asynchronous: the state is written behind the next steps, and its buffers may be
    donated as soon as `save` returns. A save that fails, as on a full disk, is logged and leaves
    nothing behind: the checkpoints before it stay, and training goes on. `wait` raises if it was the
    last one.

    Args:
      workdir: an existing directory.
      keep: how many of the newest to keep.
      run: what the arrays mean, by configuration key. A checkpoint that says otherwise is refused.
    """

    def __init__(self, workdir: str | os.PathLike, keep: int, run: Mapping[str, Any] | None = None):
        self._workdir, self._run = workdir, run or {}
        self._eval_losses: dict[int, float] = {}
        self._saving: int | None = None
        self._failure = ""  # what became of the last save, unless it is whole
        policies = ocp.checkpoint_managers.LatestN(keep), _Best(self._eval_losses)
        self._manager = make_manager(
            workdir,
            create=True,
            cleanup_tmp_directories=True,
            preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
            todelete_subdir=_TRASH,
        )
        self._eval_losses |= _eval_losses(self._all())
        self._remove_rests()

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Starts to save the state after `step` steps; does nothing if that step is saved already.

        Args:
          step: steps taken.
          state: pytree of arrays with attributes or keys `params` and `recipe_state` among others.
          metrics: with "eval_loss", if this state was evaluated.
        """
        self._finish_save()
        if step == self._manager.latest_step():
            return
        arrays = arrays_by_path(state)
        manifest = describe(step, arrays, self._run, {name: float(value) for name, value in (metrics or {}).items()})
        items = {item: _save_args(item, tree) for item, tree in unflatten_dict(arrays).items()}
        items[MANIFEST] = ocp.args.JsonSave(manifest.to_json())
        self._eval_losses[step] = _rank(manifest)
        self._saving = step
        try:
            self._remove_rests()
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)  # whether to save is decided
        except _SAVE_ERRORS as error:
            self._save_failed(error)

    def restore_latest(self, abstract_state: Any, check: Callable[[Any], None] = lambda state: None) -> Any | None:
        """Restores the newest checkpoint's state, bit for bit; None if there is none.

        One that is damaged is refused, loudly, and the one before it taken. Once that has proved whole,
        the damaged one is renamed, so that the run can save its step again.

        Args:
          abstract_state: what `save` is given, as arrays or `jax.ShapeDtypeStruct`s. An entry with a
            sharding is restored to it, others to the default device.
          check: raises ValueError of a state that no run has saved, which is damage too.

        Raises:
          WorkdirError: every checkpoint is damaged, or the newest that is not is of another run, or has
            an array that is missing, unexpected, or of another shape or dtype.
        """
        wanted = arrays_by_path(abstract_state)

        def read(checkpoint: SavedCheckpoint) -> Any:
            checkpoint.check_run(self._run)
            checkpoint.check_fits(wanted)
            restored = checkpoint.restore(wanted)
            state = jax.tree.unflatten(jax.tree.structure(abstract_state), [restored[path] for path in wanted])
            with checkpoint.damage_named():
                check(state)
            return state

        if not self._manager.all_steps():
            return None
        state, _, damaged = _newest_whole(self._workdir, self._all(), read)
        self._set_aside(damaged)
        return state

    def wait(self) -> None:
        """Returns when the last save is whole on disk.

        Raises:
          WorkdirError: it could not be written.
        """
        self._finish_save()
        if self._failure:
            raise WorkdirError(self._workdir, self._failure)

    def close(self) -> None:
        self._finish_save()
        self._manager.close()
        self._remove_rests()

    def _all(self) -> dict[int, SavedCheckpoint]:
        return _all_checkpoints(self._workdir, self._manager)

    def _finish_save(self) -> None:
        if self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
        except _SAVE_ERRORS as error:
            self._save_failed(error)
        else:
            self._saving, self._failure = None, ""

    def _save_failed(self, error: Exception) -> None:
        step, self._saving = self._saving, None
        self._manager.reload()  # it has forgotten those that the failed one was to replace
        newest = self._manager.latest_step()
        there_is = "there is none" if newest is None else f"the newest is {newest}"
        directory = self._manager.directory
        self._failure = f"checkpoint {step} could not be saved in {directory}, and {there_is}: {_reason(error)}"
        _log.error("%s", self._failure)

    def _set_aside(self, damaged: Sequence[int]) -> None:
        if not damaged:
            return
        if jax.process_index() == 0:
            for step in damaged:
                aside = self._manager.directory / f"{step}.damaged"
                shutil.rmtree(aside, ignore_errors=True)
                (self._manager.directory / str(step)).rename(aside)
                _log.warning("the damaged checkpoint %d is now %s", step, aside)
        multihost_utils.sync_global_devices("damaged checkpoints are set aside")
        self._manager.reload()

    def _remove_rests(self) -> None:
        """Deletes what is left of deleted steps and of failed saves. Nothing may be being saved."""
        directory = Path(self._manager.directory)
        # Orbax itself removes what an earlier process left of failed saves.
        failed = directory.glob("*.orbax-checkpoint-tmp*") if self._failure else ()
        for rest in (*failed, *(directory / _TRASH).glob("*")):
            shutil.rmtree(rest, ignore_errors=True)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def restore_params(
    workdir: str | os.PathLike, step: int | str = "latest", run: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Reads parameters and the recipe's state of a checkpoint, from the workdir alone.

    Args:
      workdir: of a run, which may still be training.
      step: a step, "best" (least eval_loss) or "latest", the newest that is not damaged.
      run: see `Checkpoints`.

    Returns:
      params: nested dicts of arrays, on the default device.
      recipe_state: dict of arrays by name; those that the recipe does not have are absent.
      step: of the checkpoint.

    Raises:
      WorkdirError: there is no such checkpoint, it is damaged, or it is of another run.
    """

    def read(checkpoint: SavedCheckpoint) -> dict[str, Any]:
        checkpoint.check_run(run or {})
        entries = checkpoint.manifest.arrays
        return unflatten_dict(checkpoint.restore({path: entries[path].struct for path in _of_forward(entries)}))

    restored, found = _read(workdir, step, read)
    return restored["params"], restored.get("recipe_state", {}), found


def open_params(
    workdir: str | os.PathLike, step: int | str = "latest", run: Mapping[str, Any] | None = None
) -> tuple[dict[tuple[str, ...], SavedArray], dict[str, SavedArray], int]:
    """Opens what `restore_params` restores, but reads no array yet: one may still turn out to be damaged.

    Returns:
      params: {path: array}, where a path is (name, name, ...).
      recipe_state: {name: array}; those that the recipe does not have are absent.
      step: of the checkpoint.

    Raises:
      WorkdirError: there is no such checkpoint, it is damaged, or it is of another run.
    """

    def read(checkpoint: SavedCheckpoint) -> dict[ArrayPath, SavedArray]:
        checkpoint.check_run(run or {})
        return {path: checkpoint.open(path) for path in _of_forward(checkpoint.manifest.arrays)}

    opened, found = _read(workdir, step, read)
    params = {path[1:]: array for path, array in opened.items() if path[0] == "params"}
    return params, {path[1]: array for path, array in opened.items() if path[0] == "recipe_state"}, found


def _read(workdir: str | os.PathLike, step: int | str, read: Callable[[SavedCheckpoint], _T]) -> tuple[_T, int]:
    """Applies `read` to the checkpoint that is asked for; returns the result and the step."""
    manager = make_manager(workdir, create=False)
    try:
        checkpoints = _all_checkpoints(workdir, manager)
        if not checkpoints:
            raise WorkdirError(workdir, "holds no checkpoint")
        if step == "latest":
            return _newest_whole(workdir, checkpoints, read)[:2]
        if step == "best":
            step = _best(workdir, checkpoints)
        if step not in checkpoints:
            raise WorkdirError(workdir, f"no checkpoint of step {step}; there are {', '.join(map(str, checkpoints))}")
        return read(checkpoints[step]), step
    finally:
        manager.close()


def _newest_whole(
    workdir: str | os.PathLike, checkpoints: Mapping[int, SavedCheckpoint], read: Callable[[SavedCheckpoint], _T]
) -> tuple[_T, int, list[int]]:
    """Applies `read` to the newest whole checkpoint; returns the result, its step and the damaged newer steps."""
    damaged = []
    for step in sorted(checkpoints, reverse=True):
        try:
            result = read(checkpoints[step])
        except DamagedCheckpoint as error:
            _log.error("%s", error)
            damaged.append(step)
            continue
        if damaged:
            _log.warning("using checkpoint %d instead of %d", step, damaged[0])
        return result, step, damaged
    raise WorkdirError(workdir, f"all of its checkpoints are damaged: {', '.join(map(str, checkpoints))}")


def _best(workdir: str | os.PathLike, checkpoints: Mapping[int, SavedCheckpoint]) -> int:
    losses = _eval_losses(checkpoints)
    best = min(losses, key=losses.get, default=None)
    if best is None or losses[best] == math.inf:
        raise WorkdirError(workdir, "no checkpoint was evaluated, so that none is best")
    return best


def _reason(error: Exception) -> str:
    """Extracts what the system says of a save that failed, without TensorStore's account of where."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    found = re.search(r": ([^:\[]+) \[os_error_code", str(error))
    return found[1] if found else first_line(error)


class _Best:
    """Orbax's policy that keeps the checkpoint of least eval_loss, if any was evaluated."""

    def __init__(self, eval_losses: Mapping[int, float]):
        self._eval_losses = eval_losses

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        losses = [self._eval_losses.get(checkpoint.step, math.inf) for checkpoint in checkpoints]
        return [loss == min(losses) < math.inf for loss in losses]


def _eval_losses(checkpoints: Mapping[int, SavedCheckpoint]) -> dict[int, float]:
    """Ranks checkpoints by step. A damaged manifest has no rank here, and is refused when it is asked for."""
    losses = {}
    for step, checkpoint in checkpoints.items():
        with contextlib.suppress(DamagedCheckpoint):
            losses[step] = _rank(checkpoint.manifest)
    return losses


def _rank(manifest: Manifest) -> float:
    """Returns eval_loss; infinity where the step was not evaluated or its loss was not finite."""
    loss = manifest.metrics.get("eval_loss", math.inf)
    return loss if math.isfinite(loss) else math.inf


def _all_checkpoints(workdir: str | os.PathLike, manager: ocp.CheckpointManager) -> dict[int, SavedCheckpoint]:
    for path in Path(manager.directory).glob("*"):
        if path.name.isdecimal() and not path.is_dir():
            _log.warning("%s is a file, not a checkpoint, and is passed over", path)
    return {step: SavedCheckpoint(workdir, manager, step) for step in manager.all_steps()}


def _of_forward(arrays: Iterable[ArrayPath]) -> list[ArrayPath]:
    return [path for path in arrays if path[0] in ("params", "recipe_state")]


def _save_args(item: str, tree: Any) -> ocp.args.StandardSave:
    def chunks(path: tuple, array: Any) -> ocp.SaveArgs:
        stacked_matrix = item == "params" and path[0].key == "layers" and array.ndim == 3
        return ocp.SaveArgs(shard_axes=(0,)) if stacked_matrix else ocp.SaveArgs()

    return ocp.args.StandardSave(tree, save_args=jax.tree.map_with_path(chunks, tree))
