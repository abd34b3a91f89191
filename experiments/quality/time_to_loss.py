r"""Trains the runs of a suite side by side on the GPUs of a host, and records what each took and reached.

    python -m experiments.quality.time_to_loss --suite=afm_4_layers --data=data/python --second_data=data/other \
        --workdir=runs/time_afm --gpus=0,1,2,3 --runs=dense,slices_80,slices_stay --seeds=10,11,12,13 \
        --output=experiments/results/time_afm_4_layers_h200.json --minutes=9
    python -m experiments.quality.time_ratio experiments/results/time_afm_4_layers_h200.json

GPUs work in pairs: for one seed dense runs on the first of a pair while the others run on the second, for the pair's
next seed the other way round. Branches of the longest dense run (suites.py) run behind it, on the same GPU. A run that
fails ends its GPU's queue.

Runs that the output has are left out, one that was cut short goes on from its checkpoint, and after `--minutes` those
under way are saved: the same command goes on. Checkpoints are deleted when nothing needs them any more.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags

from experiments.quality import controls
from experiments.quality.suites import ROW, SUITES, Suite
from sparse_lm.data.dataset import Data
from sparse_lm.data.opening import open_data
from sparse_lm.entry_point import configure_logs
from sparse_lm.errors import DataError, UserError
from sparse_lm.files import replacing

MOST_EPOCHS = 4  # with more, repeated text is worth much less than fresh one (2305.16264, section 5)


class Item(NamedTuple):
    """A run of the suite, or a branch of its dense run."""

    name: str
    seed: int

    @property
    def workdir(self) -> str:
        return f"{self.name}-{self.seed}"


def assign(runs: Sequence[str], seeds: Sequence[int], gpus: int) -> list[list[Item]]:
    """Returns a queue for each GPU: dense and the others side by side on a pair, sides swapped from seed to seed."""
    queues: list[list[Item]] = [[] for _ in range(gpus)]
    pairs = max(1, gpus // 2)
    for number, seed in enumerate(seeds):
        pair, turn = number % pairs, number // pairs
        for name in runs:
            side = (turn + (name != "dense")) % 2 if gpus > 1 else 0
            queues[2 * pair + side].append(Item(name, seed))
    return queues


def with_lengths(queue: Sequence[Item], suite: Suite) -> list[Item]:
    """Returns the queue with the dense runs in place of "dense", the longest before its branches."""
    lengths = (suite.longest, *(f"dense@{length}" for length in suite.lengths[:-1]))
    names = ((lengths if item.name == "dense" else [item.name], item.seed) for item in queue)
    return [Item(name, seed) for runs, seed in names for name in runs]


def check_data(suite: Suite, path: str, second: str, names: Iterable[str], rows: Sequence[dict[str, Any]]) -> None:
    """Refuses a corpus that these runs would learn by heart, or on which losses are no match for those there are.

    `second` is the corpus of the second held-out text, or empty.

    Raises:
      DataError: one of the runs would read it more than four times, or a row is of other text.
      UserError: it cannot be opened, or the suite has no such run.
    """
    config = max((suite.config(name, 0, path) for name in names), key=lambda config: config.steps)
    data = open_data(config)
    _check_text("--data", path, data, (row.get("corpus_sha256", "unknown") for row in rows))
    if second:
        with_second = [row for row in rows if "second_heldout_loss" in row]
        other = open_data(dataclasses.replace(config, data=dataclasses.replace(config.data, path=second)))
        _check_text("--second_data", second, other, (row.get("second_corpus_sha256", "unknown") for row in with_second))
    windows = len(data.train)
    epochs = config.steps * config.batch_size / windows
    if epochs > MOST_EPOCHS:
        raise DataError(
            f"--data={path}: has {windows:,} training windows, which a run of {config.steps:,} steps of "
            f"{config.batch_size} would read {epochs:.0f} times; at most {MOST_EPOCHS} times are allowed"
        )


def _check_text(flag: str, path: str, data: Data, of_rows: Iterable[str]) -> None:
    if others := {*of_rows} - {data.info["corpus_sha256"][:12]}:
        raise DataError(f"{flag}={path}: is not the text of the runs in --output, which has sha256 {min(others)}")


class Results:
    """The rows of finished runs of a suite, in a file that several threads add to; its other keys stay.

    Raises:
      DataError: the file has runs of another suite, or of this one as it was before a change, or is no result of one.
    """

    def __init__(self, path: Path, suite: str):
        self.name, self.suite = suite, SUITES[suite]
        self._path, self._lock = path, threading.Lock()
        about = dict(suite=suite, base=self.suite.base, lengths=self.suite.lengths)
        self._about = json.loads(json.dumps(about))
        self.rows = self._read().get("runs", [])

    def __contains__(self, item: Item) -> bool:
        return any((row["name"], row["seed"]) == item for row in self.rows)

    def _read(self) -> dict[str, Any]:
        if not self._path.exists():
            return {}
        try:
            found = json.loads(self._path.read_text())
            changed = [key for key, own in self._about.items() if found[key] != own]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(f"--output={self._path}: is no result of a suite: {error!r}") from error
        if changed:
            raise DataError(f"--output={self._path}: has runs of another {' and '.join(changed)} than {self.name}'s")
        return found

    def add(self, row: dict[str, Any]) -> None:
        """Adds a run's row to the file, in place of an earlier one of the same run."""
        with self._lock, replacing(self._path) as partial:
            found = self._read()  # another command may have added to it
            others = [old for old in found.pop("runs", []) if (old["name"], old["seed"]) != (row["name"], row["seed"])]
            self.rows = [*others, row | {"overrides": self.suite.overrides(row["name"])}]
            today = datetime.date.today().isoformat()
            machine = dict(device=row["device"]["kind"], date=today, jax=row["versions"]["jax"])
            partial.write_text(json.dumps(found | machine | self._about | dict(runs=self.rows)) + "\n")


class Host:
    """The GPUs of this machine, each working through a queue with one process a run.

    Args:
      command: what trains one run; it is also told which.
      root: where it keeps workdirs, and this a log of each.
      results: where rows go.
    """

    def __init__(self, command: Sequence[str], root: Path, results: Results):
        self._command, self._root, self._results = command, root, results
        self._stopping, self._under_way = threading.Event(), set()
        self.failed: list[str] = []

    def work(self, queues: dict[str, list[Item]], minutes: float) -> None:
        """Returns when all queues are worked through, or after that many minutes, when what was under way is saved."""
        threads = [threading.Thread(target=self._work_through, args=pair) for pair in queues.items()]
        timer = threading.Timer(min(60 * minutes, threading.TIMEOUT_MAX), self.stop)
        timer.daemon = True
        timer.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        timer.cancel()

    def stop(self) -> None:
        """Asks the runs under way to save and end."""
        self._stopping.set()
        for process in list(self._under_way):
            process.terminate()

    def _work_through(self, gpu: str, queue: list[Item]) -> None:
        for item in queue:
            if self._is_done(item):
                continue
            if self._stopping.is_set() or not self._run(item, gpu):
                return
            self._delete_checkpoints(item)

    def _is_done(self, item: Item) -> bool:
        """Returns True if the run is in the results; the longest must still have what missing branches begin with."""
        branches_left = item == self._longest(item) and not self._has_all_lengths(item.seed)
        return item in self._results and not (branches_left and not self._checkpoints(item).exists())

    def _longest(self, item: Item) -> Item:
        return Item(self._results.suite.longest, item.seed)

    def _has_all_lengths(self, seed: int) -> bool:
        return all(Item(f"dense@{length}", seed) in self._results for length in self._results.suite.lengths)

    def _checkpoints(self, item: Item) -> Path:
        return self._root / item.workdir / "checkpoints"

    def _delete_checkpoints(self, item: Item) -> None:
        """Deletes the checkpoints of a finished run; those of the longest dense one once all branches are done."""
        if item != self._longest(item):
            shutil.rmtree(self._checkpoints(item), ignore_errors=True)
        if item.name.startswith("dense@") and self._has_all_lengths(item.seed):
            shutil.rmtree(self._checkpoints(self._longest(item)), ignore_errors=True)

    def _run(self, item: Item, gpu: str) -> bool:
        """Trains one run to its end; returns False if it was stopped, or failed."""
        row, log = self._root / item.workdir / ROW, self._root / f"{item.workdir}.log"
        command = [*self._command, f"--run={item.name}", f"--seed={item.seed}"]
        with log.open("a") as output:
            environment = {"JAX_TRACEBACK_FILTERING": "off", **os.environ, "CUDA_VISIBLE_DEVICES": gpu}
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            self._under_way.add(process)
            if self._stopping.is_set():  # which it became before this process was listed
                process.terminate()
            status = process.wait()
            self._under_way.discard(process)
        if status or not row.exists():
            if not self._stopping.is_set():
                *_, last = ["nothing", *log.read_text(errors="replace").splitlines()]
                self.failed.append(f"{item.workdir} (exit status {status}, see {log}, which ends with: {last})")
            return False
        row = json.loads(row.read_text())
        self._results.add(row)
        print(
            f"GPU {gpu}: {item.name}, seed {item.seed}: held-out {row['heldout_loss']:.4f}, {row['seconds']:.1f} s, "
            f"compiling {row['compile_seconds']:.0f} s",
            flush=True,
        )
        return True


def main(_: Sequence[str]) -> None:
    values, suite = flags.FLAGS, SUITES[flags.FLAGS.suite]
    queues = assign(values.runs or list(suite.runs), [int(seed) for seed in values.seeds], len(values.gpus))
    queues = [with_lengths(queue, suite) for queue in queues]
    root = Path(values.workdir)
    configure_logs()
    controls.register()
    try:
        results = Results(Path(values.output), values.suite)
        names = {item.name for item in itertools.chain(*queues)}
        check_data(suite, values.data, values.second_data, names, results.rows)
    except UserError as error:
        sys.exit(str(error))
    if all(item in results for item in itertools.chain(*queues)):
        print(f"{values.output} has all of these runs")
    root.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "experiments.quality.one_run", f"--suite={values.suite}", f"--data={values.data}"]
    host = Host([*command, f"--second_data={values.second_data}", f"--root={root}"], root, results)
    signal.signal(signal.SIGTERM, lambda *_: host.stop())
    signal.signal(signal.SIGINT, lambda *_: host.stop())
    wanted = dict(zip(values.gpus, queues, strict=True))
    host.work(wanted, values.minutes)
    left = [item for queue in wanted.values() for item in queue if item not in results]
    if left:
        print(f"{len(left)} runs are left; the same command goes on: {', '.join(item.workdir for item in left)}")
    if host.failed:
        sys.exit(f"failed: {'; '.join(host.failed)}")


if __name__ == "__main__":
    flags.DEFINE_enum("suite", None, list(SUITES), "Set of runs.", required=True)
    flags.DEFINE_list("runs", [], "Names of runs; all of the suite by default.")
    branches = "must be without @, since dense stands for its branches, too, and each of them once"
    flags.register_validator("runs", lambda runs: len({*runs}) == len(runs) and "@" not in "".join(runs), branches)
    flags.DEFINE_list("seeds", ["0"], "Seeds of each run.")
    numbers = "must be whole numbers, 0 or more, each of them once"
    distinct = lambda seeds: all(map(str.isdecimal, seeds)) and len({*map(int, seeds)}) == len(seeds) > 0  # noqa: E731
    flags.register_validator("seeds", distinct, numbers)
    flags.DEFINE_list("gpus", ["0"], "GPUs, as CUDA_VISIBLE_DEVICES has them.")
    pairs = "must be one GPU or pairs of GPUs, each of them once"
    flags.register_validator("gpus", lambda gpus: len({*gpus}) == len(gpus) in (1, *range(2, 99, 2)), pairs)
    flags.DEFINE_string("data", None, "Prepared corpus.", required=True)
    flags.DEFINE_string("second_data", "", "Prepared corpus of other text with the same tokenizer; empty for none.")
    flags.DEFINE_string("workdir", None, "Directory of the runs' workdirs.", required=True)
    flags.DEFINE_string("output", None, "JSON file to write, or to add to.", required=True)
    flags.DEFINE_float("minutes", math.inf, "Stop after this long.")
    app.run(main)
