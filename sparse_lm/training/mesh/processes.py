"""Several processes that train one model: how they find each other, what they check, what they agree on.

A process is one of several in a SLURM job step of more than one task, where all is read from what `srun` sets, or if
its environment has JAX_COORDINATOR_ADDRESS=host:port of process 0, JAX_NUM_PROCESSES and JAX_PROCESS_ID.

All of them share the workdir. Process 0, the leader, writes metrics, summary and configuration for all.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from sparse_lm.config import Config, to_dict
from sparse_lm.errors import UserError

_EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


class LaunchError(UserError):
    """Processes or devices that cannot train together. The message says what is wrong and what to do."""


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Joins the other processes of a run, if the environment says that there are others. Before any use of JAX.

    A process that fails in the block ends at once, and JAX then ends the others. Else it would say goodbye to them at
    its exit, which waits for minutes while they wait for it.

    Raises:
      LaunchError: the environment says so in part only, or the others are not found.
    """
    if _join():
        atexit.register(_end_at_once)
    yield
    atexit.unregister(_end_at_once)


def _end_at_once() -> None:
    """Ends a process that has failed, and has said how; `atexit` has called what was registered after this."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # where a pipe is broken, too
        os._exit(1)


def _join() -> bool:
    """Joins the other processes, if there are others, and returns whether there are."""
    missing = [name for name in _EXPLICIT if not os.environ.get(name)]
    if len(missing) in (1, 2):
        raise LaunchError(f"{', '.join(_EXPLICIT)} are needed together, and {', '.join(missing)} is not set")
    if not missing:
        address, count, index = (os.environ[name] for name in _EXPLICIT)
        if not count.isdecimal() or not index.isdecimal() or not int(index) < int(count):
            raise LaunchError(f"JAX_PROCESS_ID={index} must be in 0..JAX_NUM_PROCESSES - 1, with {count} processes")
        arguments = dict(coordinator_address=address, num_processes=int(count), process_id=int(index))
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        arguments = dict(cluster_detection_method="slurm")
    else:
        return False
    # This service would take SIGTERM from training/interrupt.py, and nobody asks it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**arguments)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"the processes of this run did not find each other: {str(error).splitlines()[0]}. All of them must be "
            "started, and reach the first one's host and port"
        ) from error
    return True


def check(config: Config) -> None:
    """Checks that the devices of all processes can train together; several processes exchange a hash.

    Raises:
      LaunchError: processes differ in kind or number of devices, in versions or in configuration, or devices cannot
        reach each other.
    """
    kinds, of_process = (Counter(getattr(d, name) for d in jax.devices()) for name in ("device_kind", "process_index"))
    if len(kinds) > 1 or len(set(of_process.values())) > 1:
        found = f"there are {dict(kinds)}, by process {dict(of_process)}"
        raise LaunchError(f"every process must have as many devices, of one kind: {found}; see CUDA_VISIBLE_DEVICES")
    try:
        _agree(
            [jax.__version__, to_dict(config)],
            "another configuration, or another version of JAX, than process 0: start all of them with the same "
            "command, from the same installation",
        )
    except jax.errors.JaxRuntimeError as error:
        raise LaunchError(
            f"the devices of {jax.process_count()} processes do not reach each other: {str(error).splitlines()[0]}. "
            "NCCL_DEBUG=INFO shows NCCL's side; NCCL_SOCKET_IFNAME chooses the network interface"
        ) from error


def check_data(info: Mapping[str, Any]) -> None:
    """Raises LaunchError if processes have different `Data.info`. All must call this, and wait for each other."""
    _agree(
        [info["corpus_sha256"], info["tokenizer_sha256"]],
        "other text, or another tokenizer, than process 0: all of them must find the same data at config.data.path "
        "or, if that is empty, the same Python",
    )


def check_directory(directory: str | os.PathLike) -> None:
    """Raises LaunchError if processes see different directories at a path. All must call this.

    Without this check each would save its shards to a directory of its own, and wait for ever for the others'.
    """
    mark = Path(directory, ".shared")
    if is_leader():
        mark.write_text(secrets.token_hex(), encoding="utf-8")  # and closes it, so that other hosts see it
    wait_for_all("the directory is marked")
    seen = mark.read_text(encoding="utf-8") if mark.exists() else ""
    _agree(seen, f"another {directory} than process 0: it must be in a file system that all of them share")
    if is_leader():
        mark.unlink()


def _agree(value: Any, otherwise: str) -> None:
    """Raises LaunchError if a process has another value, which is JSON-ready, than process 0, and says what it has."""
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    seen = multihost_utils.process_allgather(np.frombuffer(digest, np.uint32))
    different = [index for index, row in enumerate(seen) if not np.array_equal(row, seen[0])]
    if different:
        raise LaunchError(f"processes {different} have {otherwise}")


def is_leader() -> bool:
    """Returns True on the process that writes shared files."""
    return jax.process_index() == 0


def reports_directory(workdir: str) -> contextlib.AbstractContextManager[str]:
    """Opens where this process writes its metrics: the leader into `workdir`, others where it is forgotten."""
    return contextlib.nullcontext(workdir) if is_leader() else tempfile.TemporaryDirectory()


def any_of(flag: bool) -> bool:
    """Returns whether `flag` holds in some process. All of them must call this, and wait for each other."""
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def wait_for_all(reason: str) -> None:
    """Returns when all processes have called this with the same reason."""
    multihost_utils.sync_global_devices(reason)
