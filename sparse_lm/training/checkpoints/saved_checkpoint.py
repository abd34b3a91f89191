"""One checkpoint on disk, and its arrays, which are compared with their checksums as they are read."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from flax.traverse_util import flatten_dict, unflatten_dict

from sparse_lm.training.checkpoints.manifest import ArrayPath, Manifest, ManifestError, OldFormatError
from sparse_lm.training.mesh import processes
from sparse_lm.training.workdir import OLD_VERSION, WorkdirError

ITEMS = ("params", "recipe_state", "state")
MANIFEST = "manifest"
_MANIFEST_FILE = "manifest.json"


# What is wrong with the machine, or with who asks, rather than with a checkpoint: as Python says it, and TensorStore.
_MACHINE_ERRNOS = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT}
_MACHINE_STATUSES = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED")


class DamagedCheckpoint(WorkdirError):
    """A checkpoint whose bytes are not those that were saved, or not all there."""


def make_manager(workdir: str | os.PathLike, **options: Any) -> ocp.CheckpointManager:
    """Makes Orbax's manager of a run's checkpoints, with `ocp.CheckpointManagerOptions`."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in ITEMS:
        handler = ocp.StandardCheckpointHandler()
        registry.add(item, ocp.args.StandardSave, handler)
        registry.add(item, ocp.args.StandardRestore, handler)
    registry.add(MANIFEST, ocp.args.JsonSave, ocp.JsonCheckpointHandler(filename=_MANIFEST_FILE))
    return ocp.CheckpointManager(
        Path(workdir, "checkpoints").absolute(),
        options=ocp.CheckpointManagerOptions(**options),
        handler_registry=registry,
    )


def arrays_by_path(state: Any) -> dict[ArrayPath, Any]:
    """Names a state's leaves by their paths in a checkpoint, in the order of `jax.tree.leaves`."""
    arrays = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        names = tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)
        arrays[names if names[0] in ITEMS else ("state", *names)] = leaf
    return arrays


class SavedCheckpoint:
    """The checkpoint of `step` in `workdir`, which `manager` manages. Nothing is read before it is asked for."""

    def __init__(self, workdir: str | os.PathLike, manager: ocp.CheckpointManager, step: int):
        self._workdir, self._manager, self._step = workdir, manager, step
        self._directory = Path(manager.directory, str(step))

    @functools.cached_property
    def manifest(self) -> Manifest:
        """Reads the manifest.

        Raises:
          DamagedCheckpoint: it is not what was written, or of another step than the directory's name says.
          WorkdirError: another version of this library wrote it.
        """
        with self.damage_named():
            path = self._directory / MANIFEST / _MANIFEST_FILE
            if not path.exists():
                raise ManifestError("it is incomplete, without a manifest")
            manifest = Manifest.from_json(json.loads(path.read_text(encoding="utf-8")))
            if manifest.step != self._step:
                raise ManifestError(f"it is checkpoint {manifest.step}, and its directory was renamed")
            return manifest

    def check_run(self, run: Mapping[str, Any]) -> None:
        """Raises WorkdirError if this checkpoint is of a run that has another value for one of these keys."""
        saved = self.manifest.run
        for key in saved.keys() & run.keys():
            if saved[key] != run[key]:
                raise WorkdirError(
                    self._workdir,
                    f"checkpoint {self._step} is of another run: "
                    f"config.{key} is {saved[key]!r} in the checkpoint and {run[key]!r} here",
                )

    def check_fits(self, wanted: Mapping[ArrayPath, Any]) -> None:
        """Raises WorkdirError if these arrays are not those of the checkpoint, by path, shape and dtype."""
        difference = _difference(self.manifest.arrays, wanted)
        if difference:
            raise WorkdirError(self._workdir, f"checkpoint {self._step} does not fit this run: {difference}")

    def restore(self, wanted: Mapping[ArrayPath, Any]) -> dict[ArrayPath, jax.Array]:
        """Arrays by path, on the devices that `wanted` shards them to, or the default device.

        Raises:
          DamagedCheckpoint: one cannot be read, or is not what was saved.
        """
        default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        placed = {
            path: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding or default)
            for path, array in wanted.items()
        }
        items = {item: ocp.args.StandardRestore(tree) for item, tree in unflatten_dict(placed).items()}
        if jax.process_count() > 1:
            self._check_together(wanted)
        with self.damage_named():
            restored = self._manager.restore(self._step, args=ocp.args.Composite(**items))
            restored = flatten_dict(dict(restored.items()))
            self.manifest.check(restored)
        return restored

    def _check_together(self, paths: Iterable[ArrayPath]) -> None:
        """Reads every array in one of the processes, so that all of them fail in the same way, or none: to restore,
        each reads what its devices hold and waits for the others, who would not know that it has failed."""
        failure = None
        try:
            for path in list(paths)[jax.process_index() :: jax.process_count()]:
                self.open(path).read()
        except WorkdirError as error:
            failure = error
        damaged = isinstance(failure, DamagedCheckpoint)
        if processes.any_of(failure is not None and not damaged):
            elsewhere = f"checkpoint {self._step} cannot be read now: another process says why"
            raise WorkdirError(self._workdir, elsewhere) if damaged or failure is None else failure
        if processes.any_of(damaged):
            elsewhere = f"checkpoint {self._step} is damaged: another process says where"
            raise failure or DamagedCheckpoint(self._workdir, elsewhere)

    def open(self, path: ArrayPath) -> SavedArray:
        """Opens an array that is read when it is asked for.

        Raises:
          DamagedCheckpoint: it is not there.
        """
        with self.damage_named():
            return SavedArray(self, self._directory, path)

    @contextlib.contextmanager
    def damage_named(self) -> Iterator[None]:
        """Calls whatever error a library meets in bytes that it did not write damage.

        A full accelerator is none, nor a machine that cannot read now, nor a checkpoint that is deleted meanwhile.
        """
        try:
            yield
        except (WorkdirError, jax.errors.JaxRuntimeError):
            raise
        except OldFormatError as error:
            raise WorkdirError(self._workdir, f"checkpoint {self._step} {error}: {OLD_VERSION}") from error
        except Exception as error:
            if not self._directory.exists():
                raise WorkdirError(self._workdir, f"checkpoint {self._step} was deleted while it was read") from error
            if _is_of_the_machine(error):
                cannot = f"checkpoint {self._step} cannot be read now: {first_line(error)}"
                raise WorkdirError(self._workdir, cannot) from error
            reason = str(error) if isinstance(error, ManifestError) else first_line(error)
            raise DamagedCheckpoint(self._workdir, f"checkpoint {self._step} is damaged: {reason}") from error


class SavedArray:
    """An array of a checkpoint, on disk."""

    def __init__(self, checkpoint: SavedCheckpoint, directory: Path, path: ArrayPath):
        self._checkpoint, self._path = checkpoint, path
        # As Orbax lays it out: Zarr in one OCDBT store an item, named by its path. In a URL # or ? would end the path.
        base = {"driver": "file", "path": f"{directory / path[0]}/"}
        store = {"driver": "ocdbt", "base": base, "path": f"{'.'.join(path[1:])}/"}
        self._stored = tensorstore.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result()

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Returns the shape of what is read from the disk at a time."""
        return self._stored.chunk_layout.read_chunk.shape

    def read(self, layer: int | None = None) -> np.ndarray:
        """Reads all of it, or one layer.

        Raises:
          DamagedCheckpoint: it cannot be read, or is not what was saved.
        """
        manifest = self._checkpoint.manifest
        with self._checkpoint.damage_named():
            if layer is None:
                array = self._stored.read().result()
                manifest.check({self._path: array})
            else:
                array = self._stored[layer].read().result()
                manifest.check_layer(self._path, layer, array)
        return array


def _is_of_the_machine(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _MACHINE_ERRNOS
    return isinstance(error, MemoryError) or str(error).startswith(_MACHINE_STATUSES)


def first_line(error: Exception) -> str:
    """Shortens a library's error, without the specification that TensorStore appends."""
    return f"{type(error).__name__}: {error}".splitlines()[0].split(" [tensorstore_spec")[0]


def _difference(saved: Mapping[ArrayPath, Any], wanted: Mapping[ArrayPath, Any]) -> str:
    """Names the first array that differs in path, shape or dtype, and counts the others; empty if none."""

    def describe(arrays, path):
        return f"{arrays[path].dtype}{list(arrays[path].shape)}" if path in arrays else "absent"

    pairs = [(path, describe(saved, path), describe(wanted, path)) for path in sorted(wanted.keys() | saved.keys())]
    different = [(path, there, here) for path, there, here in pairs if there != here]
    if not different:
        return ""
    path, there, here = different[0]
    more = f" ({len(different) - 1} more arrays differ)" if len(different) > 1 else ""
    return f"{'/'.join(path)} is {there} in the checkpoint and {here} here{more}"
