"""One checkpoint on disk: its manifest, and its arrays, which are compared with their checksums as they are read.

    {"format": 2, "step": 300, "run": {key: value}, "metrics": {"eval_loss": number}, "digest": SHA-256 of all the rest,
     "arrays": {"params/embed/embedding": {"shape": [...], "dtype": "float32", "checksums": [...]}, ...}}

A parameter of all layers, or an array of the recipe's state, has a checksum for each layer; any other array has one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import tensorstore

from sparse_lm.errors import WorkdirError
from sparse_lm.training.checkpoints.checksums import checksums
from sparse_lm.training.mesh import processes

FORMAT = 2
ITEMS = ("params", "recipe_state", "state")
MANIFEST, MANIFEST_FILE = "manifest", "manifest.json"

_READ_TOGETHER = 4  # arrays, which the host's memory then holds
_CACHE_BYTES = 2**32  # of what is decoded, so that a chunk is decoded once and not for every device
# What is wrong with the machine, or with who asks, rather than with a checkpoint; then as TensorStore says it.
_MACHINE_ERRNOS = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT}
_MACHINE_STATUSES = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED")

ArrayPath = tuple[str, ...]
"""The path of an array in a checkpoint: (item, name, name, ...)."""


class DamagedCheckpoint(WorkdirError):
    """A checkpoint whose bytes are not those that were saved, or not all there."""


def arrays_by_path(state: Any) -> dict[ArrayPath, Any]:
    """Names a state's leaves by their paths in a checkpoint, in the order of `jax.tree.leaves`."""
    arrays = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        names = tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)
        arrays[names if names[0] in ITEMS else ("state", *names)] = leaf
    return arrays


def make_manifest(
    step: int, arrays: Mapping[ArrayPath, Any], run: Mapping[str, Any], eval_loss: float | None
) -> dict[str, Any]:
    """Describes arrays that are about to be saved. Waits for them to be computed."""
    metrics = {} if eval_loss is None else {"eval_loss": eval_loss}
    content = {"format": FORMAT, "step": step, "run": run, "metrics": metrics, "arrays": _describe(arrays)}
    content = json.loads(json.dumps(content))  # as it will be read, so that the digest is of that
    return {**content, "digest": _digest(content)}


def eval_loss(manifest: Mapping[str, Any]) -> float:
    """Returns the held-out loss of a checkpoint; infinity where it was not evaluated or was not finite."""
    loss = manifest["metrics"].get("eval_loss", math.inf)
    return loss if math.isfinite(loss) else math.inf


class SavedCheckpoint:
    """The checkpoint of `step` in `workdir`. Nothing is read before it is asked for."""

    def __init__(self, workdir: str | os.PathLike, step: int):
        self._workdir, self._step = workdir, step
        self._directory = Path(workdir, "checkpoints", str(step)).absolute()

    @functools.cached_property
    def manifest(self) -> dict[str, Any]:
        """Reads the manifest.

        Raises:
          DamagedCheckpoint: it is not what was written, or of another step than the directory's name says.
          WorkdirError: another version of this library wrote it.
        """
        with self._damage_named():
            content = json.loads((self._directory / MANIFEST / MANIFEST_FILE).read_text(encoding="utf-8"))
            if content["digest"] != _digest(content):
                raise self._damaged("its manifest is not what was written")
            if content["step"] != self._step:
                raise self._damaged(f"it is checkpoint {content['step']}, and its directory was renamed")
        if content["format"] != FORMAT:
            reason = f"checkpoint {self._step} has format {content['format']}; this version reads format {FORMAT}"
            raise WorkdirError(self._workdir, reason)
        return content

    @property
    def arrays(self) -> dict[ArrayPath, jax.ShapeDtypeStruct]:
        """Returns the shapes and dtypes of all arrays."""
        return {
            tuple(name.split("/")): jax.ShapeDtypeStruct(entry["shape"], entry["dtype"])
            for name, entry in self.manifest["arrays"].items()
        }

    @property
    def eval_loss(self) -> float:
        """Reads the held-out loss; infinity where there is none. Raises what `manifest` does."""
        return eval_loss(self.manifest)

    def check_run(self, run: Mapping[str, Any]) -> None:
        """Raises WorkdirError if this checkpoint is of a run that has another value for one of these keys."""
        saved = self.manifest["run"]
        for key in saved.keys() & run.keys():
            if saved[key] != run[key]:
                reason = f"config.{key} is {saved[key]!r} in the checkpoint and {run[key]!r} here"
                raise WorkdirError(self._workdir, f"checkpoint {self._step} is of another run: {reason}")

    def check_fits(self, wanted: Mapping[ArrayPath, Any]) -> None:
        """Raises WorkdirError if these arrays are not those of the checkpoint, by path, shape and dtype."""
        saved, here = (
            {"/".join(path): f"{array.dtype}{list(array.shape)}" for path, array in arrays.items()}
            for arrays in (self.arrays, wanted)
        )
        different = sorted(name for name in saved.keys() | here.keys() if saved.get(name) != here.get(name))
        if different:
            name, more = different[0], f" ({len(different) - 1} more arrays differ)" if different[1:] else ""
            reason = f"{name} is {saved.get(name, 'absent')} in the checkpoint and {here.get(name, 'absent')} here"
            raise WorkdirError(self._workdir, f"checkpoint {self._step} does not fit this run: {reason}{more}")

    def restore(self, wanted: Mapping[ArrayPath, Any]) -> dict[ArrayPath, jax.Array]:
        """Reads arrays to the devices that `wanted` shards them to, or the default device; each process its own parts.

        Raises:
          DamagedCheckpoint: one is not what was saved.
          WorkdirError: one cannot be read now. All processes raise the same, or none raises.
        """
        failure = None
        try:
            with self._damage_named(), ThreadPoolExecutor(_READ_TOGETHER) as threads:
                restored = dict(zip(wanted, threads.map(self._read, wanted.keys(), wanted.values()), strict=True))
        except WorkdirError as error:
            failure = error
        damaged = isinstance(failure, DamagedCheckpoint)
        if processes.any_of(failure is not None and not damaged):
            raise self._unreadable("another process says why") if damaged or failure is None else failure
        if processes.any_of(damaged):
            raise failure or self._damaged("another process says where")
        for name, found in _describe(restored).items():
            if found != self.manifest["arrays"][name]:
                raise self._damaged(f"{name} is not what was saved")
        return restored

    def _read(self, path: ArrayPath, wanted: Any) -> jax.Array:
        # As Orbax lays it out: Zarr in one OCDBT store an item, named by its path. In a URL # or ? would end the path.
        base = {"driver": "file", "path": f"{self._directory / path[0]}/"}
        store = {"driver": "ocdbt", "base": base, "path": f"{'.'.join(path[1:])}/"}
        cache = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        spec = {"driver": "zarr", "kvstore": store, "recheck_cached_data": False}
        stored = tensorstore.open(spec, open=True, read=True, context=cache).result()
        if wanted.sharding is None:  # not committed to the device, as a new run's are: else all is compiled again
            return jax.device_put(stored.read().result())
        return jax.make_array_from_callback(stored.shape, wanted.sharding, lambda index: stored[index].read().result())

    @contextlib.contextmanager
    def _damage_named(self) -> Iterator[None]:
        """Calls whatever error a library meets in bytes that it did not write damage.

        Memory that is full is none, nor a machine that cannot read now, nor a checkpoint that is deleted meanwhile.
        """
        try:
            yield
        except (WorkdirError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            if not self._directory.exists():
                raise self._unreadable("it was deleted while it was read") from error
            if _of_the_machine(error) or str(error).startswith(_MACHINE_STATUSES):
                raise self._unreadable(first_line(error)) from error
            raise self._damaged(first_line(error)) from error

    def _unreadable(self, reason: str) -> WorkdirError:
        return WorkdirError(self._workdir, f"checkpoint {self._step} cannot be read now: {reason}")

    def _damaged(self, reason: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(self._workdir, f"checkpoint {self._step} is damaged: {reason}")


def saved_checkpoints(workdir: str | os.PathLike) -> dict[int, SavedCheckpoint]:
    """Finds the checkpoints of a run, by step and in order; saves that are under way are none."""
    steps = [int(path.name) for path in Path(workdir, "checkpoints").glob("*/") if path.name.isdecimal()]
    return {step: SavedCheckpoint(workdir, step) for step in sorted(steps)}


def first_line(error: Exception) -> str:
    """Shortens a library's error, without the specification that TensorStore appends."""
    return f"{type(error).__name__}: {error}".splitlines()[0].split(" [tensorstore_spec")[0]


def _describe(arrays: Mapping[ArrayPath, Any]) -> dict[str, dict[str, Any]]:
    """Returns shape, dtype and checksums of arrays, on whatever devices, as a manifest states them."""
    by_layer = tuple(int(path[:2] == ("params", "layers") or path[0] == "recipe_state") for path in arrays)
    words = jax.device_get(checksums(list(arrays.values()), axes_kept=by_layer))
    return {
        "/".join(path): {
            "shape": list(array.shape),
            "dtype": array.dtype.name,
            "checksums": [f"{high:08x}{low:08x}" for high, low in pairs.reshape(-1, 2)],
        }
        for (path, array), pairs in zip(arrays.items(), words, strict=True)
    }


def _digest(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _of_the_machine(error: BaseException | None) -> bool:
    """Returns True if an error, or one that led to it, says that the machine cannot read now, whatever is on disk."""
    while error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _MACHINE_ERRNOS):
            return True
        error = error.__cause__ or error.__context__
    return False
