"""A run's directory, which one run at a time trains in, and its configuration, so that later commands need no other."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_collections
from flax.traverse_util import flatten_dict

from sparse_lm.config import Config, parse, to_dict
from sparse_lm.errors import ConfigError, WorkdirError
from sparse_lm.files import try_lock, write_json, writing
from sparse_lm.training.checkpoints.saved_checkpoint import saved_checkpoints
from sparse_lm.training.mesh import processes
from sparse_lm.training.telemetry.metrics import read_metrics

LOCK_FILE = ".lock"

RESUMABLE_CHANGES = frozenset(
    (
        # The learning-rate schedule follows another number of steps.
        "steps", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "keep_every",
        "microbatches", "mesh.data", "mesh.fsdp", "mesh.expert", "mesh.tensor",
        # What the paths of data and tokenizer lead to is compared: run_data.py.
        "data.path", "data.tokenizer", "data.cache_dir", "data.eval_windows",
        "model.remat", "model.unroll_layers", "model.loss_chunk",
        "optimizer.max_skipped_steps", "sparsity.implementation",
    )
)  # fmt: skip
"""Keys that may differ between a run and its resumption: they do not change what is trained. Of those of the
mesh, and microbatches, only rounding and, of sparse recipes, which tokens choose a pattern together."""


@contextlib.contextmanager
def workdir_lock(workdir: str | os.PathLike) -> Iterator[None]:
    """Makes a workdir if need be and holds its lock. The leader of several processes holds it for all of them.

    Raises:
      WorkdirError: it cannot be written, or another run holds the lock. The message names that one's host and process.
      LaunchError: processes see different directories there.
    """
    with contextlib.ExitStack() as held:
        holder = None
        with writing(WorkdirError, workdir):
            Path(workdir).mkdir(parents=True, exist_ok=True)
            file = held.enter_context(open(Path(workdir, LOCK_FILE), "a+", encoding="utf-8"))
            if processes.is_leader() and not try_lock(file):
                file.seek(0)
                holder = file.read() or "another process"
            elif processes.is_leader():
                file.truncate(0)
                now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                file.write(f"process {os.getpid()} on {socket.gethostname()} (since {now})")
                file.flush()
        if processes.any_of(holder is not None):
            raise WorkdirError(workdir, f"{holder or 'another process'} trains in it; use another --workdir, or wait")
        with writing(WorkdirError, workdir):
            processes.check_directory(workdir)
        yield


def save_config(workdir: str | os.PathLike, config: Config) -> None:
    """Writes config.json, all of it or nothing, in the leader; raises WorkdirError if it cannot be written."""
    if processes.is_leader():
        with writing(WorkdirError, workdir):
            write_json(Path(workdir, "config.json"), to_dict(config))


def read_config(workdir: str | os.PathLike) -> dict[str, Any]:
    """Reads config.json as it is; raises WorkdirError if there is no run in this directory, or the file is damaged."""
    path = Path(workdir, "config.json")
    if not path.exists():
        raise WorkdirError(workdir, "has no config.json, as every run has")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkdirError(workdir, f"config.json cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise WorkdirError(workdir, f"config.json must be a group of keys, not {type(values).__name__}")
    return values


def load_config(workdir: str | os.PathLike) -> Config:
    """Reads the configuration that a workdir's run was started or last resumed with.

    Raises what `read_config` does, and ConfigError if it has keys or values that this version does not allow.
    """
    return parse(ml_collections.ConfigDict(read_config(workdir)))


def meaning(config: Config) -> dict[str, Any]:
    """Returns the configuration keys that say what the arrays of checkpoints mean: the model's, and the recipe's."""
    return {
        key: value
        for key, value in flatten_dict(to_dict(config), sep=".").items()
        if key == "sparsity.recipe" or (key.startswith("model.") and key not in RESUMABLE_CHANGES)
    }


def check_same_config(workdir: str | os.PathLike, config: Config) -> list[str]:
    """Refuses to resume a run with a configuration that would train something else.

    A workdir takes any configuration if it has no run, or one that ended before its first step, for want of memory,
    say.

    Returns:
      a line for each change, to be logged once nothing else refuses the run.

    Raises:
      ConfigError: naming the key and both values. A run cannot be made shorter, either.
      WorkdirError: it has logged twice `checkpoint_every` steps, and has no checkpoint.
    """
    if not has_begun(workdir):
        return []
    earlier = load_config(workdir)
    if not saved_checkpoints(workdir):
        logged = max((line["step"] for line in read_metrics(workdir)), default=0)
        if logged >= 2 * earlier.checkpoint_every:  # the first may have been under way when the run was killed
            remedy = "put its checkpoints back, or use another --workdir"
            raise WorkdirError(workdir, f"has no checkpoint, although step {logged} is logged: {remedy}")
    before, now = (flatten_dict(to_dict(c), sep=".") for c in (earlier, config))
    changed = {key: value for key, value in now.items() if value != before.get(key)}
    stay = earlier.sparsity.stays and config.sparsity.stays  # whose sparse phase ends with the run, however long
    allowed = RESUMABLE_CHANGES | ({"sparsity.end_step"} if stay else set())
    for key, value in changed.items():
        if key not in allowed or (key == "mesh.tensor" and config.sparsity.phase):
            reason = f"the run in {os.fspath(workdir)} has {before.get(key)!r}; use that, or another --workdir"
            raise ConfigError(key, value, reason)
    if config.steps < before["steps"]:
        reason = f"the run in {os.fspath(workdir)} is of {before['steps']} steps and cannot be made shorter"
        raise ConfigError("steps", config.steps, f"{reason}; use another --workdir")
    return [f"resuming with config.{key} = {value!r} (was {before.get(key)!r})" for key, value in changed.items()]


def has_begun(workdir: str | os.PathLike) -> bool:
    """Returns True if the run has logged a step or saved one; else there is nothing to resume, or to lose."""
    metrics, checkpoints = Path(workdir, "metrics.jsonl"), Path(workdir, "checkpoints")
    return (metrics.exists() and metrics.stat().st_size > 0) or (checkpoints.exists() and any(checkpoints.iterdir()))
