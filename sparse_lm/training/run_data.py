"""The data of a run: the same text and the same tokenizer from its first step to its last evaluation."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
from jax import Array

from sparse_lm.config import Config, with_tokenizer
from sparse_lm.data.dataset import TOKENIZER_FILE, Data
from sparse_lm.data.opening import open_data
from sparse_lm.data.pipeline import train_batches
from sparse_lm.data.tokenizer import fingerprint, load_tokenizer
from sparse_lm.errors import ConfigError, WorkdirError
from sparse_lm.files import replacing, write_json, writing
from sparse_lm.training.mesh import processes
from sparse_lm.training.mesh.layout import Layout, row_share
from sparse_lm.training.workdir import has_begun, save_config

_log = logging.getLogger(__name__)

FILE = "data.json"


def open_data_together(workdir: str | os.PathLike, config: Config) -> Data:
    """Opens a run's data in all of its processes: the leader prepares and records it, the others wait for that.

    Raises:
      ConfigError, DataError: the data cannot be used, or is not what the run began with.
      WorkdirError: the workdir cannot be written.
      LaunchError: processes have opened different data.
    """
    if not processes.is_leader():
        processes.wait_for_all("data is prepared")
    data = open_run_data(workdir, config)
    if processes.is_leader():
        check_same_data(workdir, config, data)
        if not has_begun(workdir):  # else once this process trains
            save_config(workdir, config)
        with writing(WorkdirError, workdir):
            with replacing(Path(workdir, TOKENIZER_FILE)) as partial:
                shutil.copyfile(data.tokenizer_path, partial)
            write_json(Path(workdir, FILE), {"corpus_sha256": data.info["corpus_sha256"]})
        processes.wait_for_all("data is prepared")
    processes.check_data(data.info)
    return data


def device_batches(data: Data, config: Config, layout: Layout | None, start_step: int) -> Iterator[Array]:
    """Yields the batches from a step on, on the devices; of each batch this process reads its own rows."""
    index, count = row_share(layout.batch, config.batch_size) if layout else (0, 1)
    batches = train_batches(
        data,
        batch_size=config.batch_size,
        seed=config.seed,
        start_step=start_step,
        process_index=index,
        process_count=count,
    )
    return map(layout.place_rows if layout else jax.device_put, batches)


def open_run_data(workdir: str | os.PathLike, config: Config) -> Data:
    """Opens the data, with the workdir's tokenizer if the file that the configuration names is gone."""
    named, own = config.data.tokenizer, Path(workdir, TOKENIZER_FILE)
    if named and own.exists() and not Path(named).exists():
        _log.warning("config.data.tokenizer = %r is gone: %s is used", named, own)
        config = with_tokenizer(config, str(own))
    return open_data(config)


def check_same_data(workdir: str | os.PathLike, config: Config, data: Data) -> None:
    """Refuses to resume a run on other text, some of which it would skip or repeat, or with another tokenizer.

    A workdir takes any data if it has no run, or one that ended before its first step.

    Raises:
      ConfigError: naming the data and the workdir.
      DataError: the workdir's tokenizer.json cannot be read.
      WorkdirError: its data.json cannot be read.
    """
    if not has_begun(workdir):
        return
    check_same_tokenizer(workdir, config, data)
    path, now = Path(workdir, FILE), data.info["corpus_sha256"]
    try:
        before = str(json.loads(path.read_text(encoding="utf-8"))["corpus_sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorkdirError(workdir, f"{FILE} cannot be read, which tells the run's text: {error}") from error
    if before != now:
        difference = f"has other text (sha256 {now[:12]}, not {before[:12]}) than"
        raise _refusal(workdir, config, data, difference, "use the data of that run")


def check_same_tokenizer(workdir: str | os.PathLike, config: Config, data: Data) -> None:
    """Refuses data with another tokenizer than the workdir's, if it has one: tokens would mean something else."""
    path = Path(workdir, TOKENIZER_FILE)
    if path.exists() and fingerprint(load_tokenizer(path)) != data.info["tokenizer_sha256"]:
        remedy = f"prepare it with --tokenizer={path}"
        raise _refusal(workdir, config, data, "has another tokenizer than", remedy)


def _refusal(workdir: str | os.PathLike, config: Config, data: Data, difference: str, remedy: str) -> ConfigError:
    reason = f"{data.directory} {difference} the run in {os.fspath(workdir)}; {remedy}, or use another --workdir"
    return ConfigError("data.path", config.data.path, reason)
