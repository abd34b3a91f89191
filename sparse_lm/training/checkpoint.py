"""Checkpoints of a run's state.

    checkpoints/<step>/params      nested dicts of arrays, all that a forward pass needs
    checkpoints/<step>/variables   what the sparse FFN reads and does not train (absent if nothing)
    checkpoints/<step>/state       the rest of the training state: optimizer, counters
    checkpoints/<step>/metrics     JSON; eval_loss, if the step was evaluated

Arrays are named by their path in the state, so that a checkpoint is read without the classes that
wrote it, and one that does not fit is refused by name. The matrices of all layers are one array, of
which each layer is a chunk on disk and can be read alone. A step is written to a temporary directory
and renamed when it is whole, and renamed again before it is deleted: a kill leaves only whole ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore
from flax.traverse_util import flatten_dict, unflatten_dict

from sparse_lm.training.workdir import WorkdirError

ITEMS = ("params", "variables", "state")
_TRASH = ".deleted"  # beside the steps


class Checkpoints:
    """The checkpoints of a run in training: the newest `keep`, and the one of least eval_loss.

    Saves are asynchronous: the state is written behind the next steps, and its buffers may be
    donated as soon as `save` returns. An error of a save is raised by the next call of `save`,
    `wait` or `close`.

    Args:
      workdir: an existing directory.
      keep: how many of the newest to keep.
    """

    def __init__(self, workdir: str | os.PathLike, keep: int):
        self._workdir = workdir
        policies = (
            ocp.checkpoint_managers.LatestN(keep),
            ocp.checkpoint_managers.BestN(
                get_metric_fn=_eval_loss, n=1, reverse=True, keep_checkpoints_without_metrics=False
            ),
        )
        self._manager = _manager(
            workdir,
            create=True,
            cleanup_tmp_directories=True,
            preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
            todelete_subdir=_TRASH,
        )
        self._empty_trash()

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Starts to save the state after `step` steps; does nothing if that step is saved already.

        Args:
          step: steps taken.
          state: pytree of arrays with attributes or keys `params` and `variables` among others.
          metrics: with "eval_loss", if this state was evaluated.
        """
        if step == self._manager.latest_step():
            return
        self._empty_trash()
        items = unflatten_dict(_arrays(state))
        self._manager.save(
            step,
            args=ocp.args.Composite(**{item: _save_args(item, tree) for item, tree in items.items()}),
            metrics={name: float(value) for name, value in (metrics or {}).items()},
            force=True,  # whether to save is the caller's decision
        )

    def restore_latest(self, abstract_state: Any) -> Any | None:
        """The state of the newest checkpoint, bit for bit; None if there is none.

        Args:
          abstract_state: what `save` is given, as arrays or `jax.ShapeDtypeStruct`s. An entry with a
            sharding is restored to it, others to the default device.

        Raises:
          WorkdirError: an array is missing, unexpected, or of another shape or dtype.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        wanted, saved = _arrays(abstract_state), _saved_arrays(self._manager, step)
        difference = _difference(saved, wanted)
        if difference:
            raise WorkdirError(self._workdir, f"checkpoint {step} does not fit this run: {difference}")
        restored = _restore(self._manager, step, {path: _placed(a, a.sharding) for path, a in wanted.items()})
        return jax.tree.unflatten(jax.tree.structure(abstract_state), [restored[path] for path in wanted])

    def wait(self) -> None:
        """Returns when the last save is whole on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()
        self._empty_trash()

    def _empty_trash(self) -> None:
        for step in (self._manager.directory / _TRASH).glob("*"):
            step.rmtree()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def restore_params(
    workdir: str | os.PathLike, step: int | str | None = None
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Parameters and sparse variables of a checkpoint, from the workdir alone.

    Args:
      workdir: of a run, which may still be training.
      step: a step, "best" (least eval_loss), or None or "latest".

    Returns:
      params: nested dicts of arrays, on the default device.
      variables: dict of arrays by name; those that the recipe does not have are absent.
      step: of the checkpoint.

    Raises:
      WorkdirError: there is no such checkpoint.
    """
    manager = _manager(workdir, create=False)
    try:
        found = _find(manager, workdir, step)
        arrays = {path: a for path, a in _saved_arrays(manager, found).items() if path[0] in ("params", "variables")}
        restored = unflatten_dict(_restore(manager, found, arrays))
    finally:
        manager.close()
    return restored["params"], restored.get("variables", {}), found


def open_params(
    workdir: str | os.PathLike, step: int | str | None = None
) -> tuple[dict[tuple[str, ...], tensorstore.TensorStore], dict[str, tensorstore.TensorStore], int]:
    """Like `restore_params`, but nothing is read yet: `array[layer].read().result()` reads one layer.

    Args:
      workdir: of a run, which may still be training.
      step: a step, "best" (least eval_loss), or None or "latest".

    Returns:
      params: {path: array}, where a path is (name, name, ...).
      variables: {name: array}; those that the recipe does not have are absent.
      step: of the checkpoint.

    Raises:
      WorkdirError: there is no such checkpoint.
    """
    manager = _manager(workdir, create=False)
    try:
        found = _find(manager, workdir, step)
        opened = {path: _open(manager.directory / str(found), path) for path in _saved_arrays(manager, found)
                  if path[0] in ("params", "variables")}  # fmt: skip
    finally:
        manager.close()
    params = {path[1:]: array for path, array in opened.items() if path[0] == "params"}
    return params, {path[1]: array for path, array in opened.items() if path[0] == "variables"}, found


# Arrays of a checkpoint: {path: array}, where a path is (item, name, name, ...).


def _arrays(state: Any) -> dict[tuple[str, ...], Any]:
    arrays = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        names = tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)
        arrays[names if names[0] in ITEMS else ("state", *names)] = leaf
    return arrays


def _save_args(item: str, tree: Any) -> ocp.args.StandardSave:
    def chunks(path: tuple, array: Any) -> ocp.SaveArgs:
        stacked_matrix = item == "params" and path[0].key == "layers" and array.ndim == 3
        return ocp.SaveArgs(shard_axes=(0,)) if stacked_matrix else ocp.SaveArgs()

    return ocp.args.StandardSave(tree, save_args=jax.tree.map_with_path(chunks, tree))


def _open(directory: Path, path: tuple[str, ...]) -> tensorstore.TensorStore:
    """An array as Orbax lays it out: Zarr in one OCDBT store an item, named by its path."""
    store = {"driver": "ocdbt", "base": f"file://{directory / path[0]}/", "path": f"{'.'.join(path[1:])}/"}
    return tensorstore.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result()


def _saved_arrays(manager: ocp.CheckpointManager, step: int) -> dict[tuple[str, ...], jax.ShapeDtypeStruct]:
    metadata = manager.item_metadata(step)
    saved = flatten_dict({item: metadata[item].tree for item in ITEMS if item in metadata})
    return {path: _placed(array) for path, array in saved.items()}


def _placed(array: Any, sharding: jax.sharding.Sharding | None = None) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `array`, and where to restore it: the default device unless told otherwise."""
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding or default)


def _restore(
    manager: ocp.CheckpointManager, step: int, arrays: Mapping[tuple[str, ...], jax.ShapeDtypeStruct]
) -> dict[tuple[str, ...], jax.Array]:
    items = {item: ocp.args.StandardRestore(tree) for item, tree in unflatten_dict(arrays).items()}
    return flatten_dict(dict(manager.restore(step, args=ocp.args.Composite(**items)).items()))


def _difference(saved: Mapping[tuple[str, ...], Any], wanted: Mapping[tuple[str, ...], Any]) -> str:
    """The first array that differs in path, shape or dtype, and how many more do; empty if none."""

    def describe(arrays, path):
        return f"{arrays[path].dtype}{list(arrays[path].shape)}" if path in arrays else "absent"

    pairs = [(path, describe(saved, path), describe(wanted, path)) for path in {**wanted, **saved}]
    different = [(path, there, here) for path, there, here in pairs if there != here]
    if not different:
        return ""
    path, there, here = different[0]
    more = f" ({len(different) - 1} more arrays differ)" if len(different) > 1 else ""
    return f"{'/'.join(path)} is {there} in the checkpoint and {here} here{more}"


def _find(manager: ocp.CheckpointManager, workdir: str | os.PathLike, step: int | str | None) -> int:
    steps = manager.all_steps()
    if not steps:
        raise WorkdirError(workdir, "holds no checkpoint")
    if step in (None, "latest"):
        return max(steps)
    if step == "best":
        best = manager.best_step()
        if best is None or _eval_loss(manager.metrics(best)) == math.inf:
            raise WorkdirError(workdir, "no checkpoint was evaluated, so that none is best")
        return best
    if step not in steps:
        raise WorkdirError(workdir, f"no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
    return step


def _manager(workdir: str | os.PathLike, **options: Any) -> ocp.CheckpointManager:
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in ITEMS:
        handler = ocp.StandardCheckpointHandler()
        registry.add(item, ocp.args.StandardSave, handler)
        registry.add(item, ocp.args.StandardRestore, handler)
    return ocp.CheckpointManager(
        Path(workdir, "checkpoints").absolute(),
        options=ocp.CheckpointManagerOptions(best_fn=_eval_loss, best_mode="min", **options),
        handler_registry=registry,
    )


def _eval_loss(metrics: Mapping[str, float]) -> float:
    """For ranking: infinite where the step was not evaluated or had none to speak of."""
    loss = metrics.get("eval_loss", math.inf)
    return loss if math.isfinite(loss) else math.inf
