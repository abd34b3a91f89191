"""Kills a run again and again, and compares what it ends with to a run that was left alone.

    python -m experiments.quality.kill_training --kills=50 --output=experiments/results/kills_cpu.json

Kills (SIGKILL) come in three kinds, at random: while a checkpoint is being written, at any step, and at
any time after the process was started, before it trains included. Each time, the run must go on from the
newest checkpoint on disk, and have lost no more than the steps since the last whole save. In the end its
losses, of every step and held out, must be those of the other run, bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter

from absl import app, flags

from experiments.result_files import write_results
from sparse_lm.prepare_data import prepare_files
from sparse_lm.training.checkpoints.saved_checkpoint import saved_checkpoints
from sparse_lm.training.telemetry.metrics import FILE, read_metrics

STEPS = 400
SAVE_EVERY = 5
KINDS = ("while saving", "at a step", "at a time")
TIMED = ("step_time", "wall_time", "tokens_per_second", "mfu", "executed_utilisation")
OVERRIDES = {
    "steps": STEPS,
    "batch_size": 4,
    "seq_len": 32,
    "log_every": 1,
    "eval_every": 50,
    "checkpoint_every": SAVE_EVERY,
    "model.dim": 32,
    "model.layers": 2,
    "model.kv_heads": 2,
    "model.ffn_dim": 128,
    "model.vocab_size": 320,
    "sparsity.start_step": 100,
    "sparsity.end_step": 260,
    "sparsity.v": 16,
    "sparsity.m": 8,
    "data.eval_windows": 16,
}


def main(_: list[str]) -> None:
    rng, count = random.Random(flags.FLAGS.seed), flags.FLAGS.kills
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        data = prepare_data(root)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(root / "compiled"))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

        finish(command(data, root / "whole"))
        kills = []
        for index in range(count):
            goal = round((index + 1) * STEPS / (count + 1))
            kill = kill_once(command(data, root / "killed"), root / "killed", goal, rng)
            kills.append(kill)
            print(f"{index + 1}: {kill}", flush=True)
        output = finish(command(data, root / "killed"))
        check_resumed(output, kills[-1]["newest_checkpoint"])
        whole, killed = trace(root / "whole"), trace(root / "killed")

    write_results(
        kills=len(kills),
        by_kind=Counter(kill["kind"] for kill in kills),
        with_a_checkpoint_half_written=sum(kill["half_written"] for kill in kills),
        most_steps_lost=max(kill["steps_lost"] for kill in kills),
        steps_between_saves=SAVE_EVERY,
        steps=len(whole),
        same_bits=whole == killed,
        heldout_loss=whole[-1]["eval_loss"],
    )
    if whole != killed:
        sys.exit("the run that was killed ended with other losses")


def prepare_data(root: pathlib.Path) -> pathlib.Path:
    """Prepares a small corpus: some modules of the standard library."""
    library = pathlib.Path(os.__file__).parent
    prepare_files([str(library / "[a-d]*.py")], root / "data", seq_len=OVERRIDES["seq_len"], vocab_size=300)
    return root / "data"


def command(data: pathlib.Path, workdir: pathlib.Path) -> list[str]:
    """Returns the command that trains, or goes on, in a workdir."""
    overrides = [f"--config.{key}={value}" for key, value in {**OVERRIDES, "data.path": data}.items()]
    return [sys.executable, "-m", "sparse_lm.train", "--config=configs/tiny.py", f"--workdir={workdir}", *overrides]


def finish(arguments: list[str]) -> str:
    return subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True).stdout


def kill_once(arguments: list[str], workdir: pathlib.Path, goal: int, rng: random.Random) -> dict:
    """Starts the run, kills it at about step `goal`, or the next one if it was there before, and says what it left."""
    before, leftovers = newest_checkpoint(workdir), half_written(workdir)
    goal = max(goal, steps_done(workdir) + 1)
    kind = rng.choice(KINDS)
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    if kind == "at a time":
        time.sleep(rng.uniform(0, 12))
    else:
        wait_for(process, lambda: steps_done(workdir) >= goal)
    if kind == "while saving":
        wait_for(process, lambda: half_written(workdir) - leftovers)
        time.sleep(rng.uniform(0, 0.01))
    else:
        time.sleep(rng.uniform(0, 0.05))
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    newest, done = newest_checkpoint(workdir), steps_done(workdir)
    check_resumed(output, before)
    lost = done - newest
    # A save is under way while the next steps are taken; it counts from when it is whole.
    assert lost <= 2 * SAVE_EVERY, (done, newest)
    return {
        "kind": kind,
        "half_written": bool(half_written(workdir) - leftovers),
        "newest_checkpoint": newest,
        "steps_lost": max(lost, 0),
    }


def check_resumed(output: str, checkpoint: int) -> None:
    """Asserts that the run said that it goes on from this checkpoint, if it came so far."""
    resumed = re.search(r"going on from step (\d+)", output)
    assert not resumed or int(resumed[1]) == checkpoint, (resumed[1], checkpoint)


def wait_for(process: subprocess.Popen, condition) -> None:
    while process.poll() is None and not condition():
        time.sleep(0.0005)


def steps_done(workdir: pathlib.Path) -> int:
    """Counts the whole lines of the metrics, one a step."""
    path = workdir / FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


def newest_checkpoint(workdir: pathlib.Path) -> int:
    """Returns the steps before the newest whole checkpoint; 0 without one."""
    return max(saved_checkpoints(workdir), default=0)


def half_written(workdir: pathlib.Path) -> set[int]:
    """Returns the checkpoints that are being written, or were cut short, by number of inode: names come again."""
    inodes = set()
    for path in (workdir / "checkpoints").glob("*-tmp"):
        with contextlib.suppress(FileNotFoundError):  # it became whole meanwhile, or was removed
            inodes.add(path.stat().st_ino)
    return inodes


def trace(workdir: pathlib.Path) -> list[dict]:
    """Returns what must not depend on kills: everything but times."""
    return [{name: value for name, value in line.items() if name not in TIMED} for line in read_metrics(workdir)]


if __name__ == "__main__":
    flags.DEFINE_integer("kills", 50, "How many.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of the moments.")
    app.run(main)
