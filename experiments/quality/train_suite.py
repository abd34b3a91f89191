r"""Trains the runs of a suite and records their losses: what a recipe costs at equal tokens.

    python -m experiments.quality.train_suite --suite=recipes --data=data/corpus --seeds=0,1 \
        --workdir=runs/quality --output=experiments/results/quality_recipes.json --minutes=9

Runs that the output already has are left out, one that was cut short goes on from its checkpoint, and
after `--minutes` the one under way is saved and the script ends: the same command goes on. Several
scripts, each with some of the runs (`--runs`, `--seeds`), may share an output.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import pathlib
import re
import signal
import statistics
import time

from absl import app, flags

from experiments.quality.suites import SUITES, config
from experiments.result_files import machine
from sparse_lm.files import replacing
from sparse_lm.training.loop import train
from sparse_lm.training.telemetry.metrics import read_metrics

SUITE = flags.DEFINE_enum("suite", None, list(SUITES), "Set of runs.", required=True)
RUNS = flags.DEFINE_list("runs", [], "Names of runs; all of the suite by default (';' stands for a comma).")
SEEDS = flags.DEFINE_list("seeds", ["0"], "Seeds of each run.")
DATA = flags.DEFINE_string("data", None, "Prepared corpus.", required=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Where the runs live.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)
MINUTES = flags.DEFINE_float("minutes", math.inf, "Stop after this long.")

LAST_STEPS = 100  # the training loss is averaged over this many


def read_run(workdir: pathlib.Path) -> dict:
    """Losses and sparsity of a finished run, from its metrics; without losses that were not finite."""
    lines = list(read_metrics(workdir))
    finite = [line for line in lines if line["loss"] is not None]
    evaluated = [line for line in lines if line.get("eval_loss") is not None]
    last = [line["loss"] for line in finite if line["step"] > lines[-1]["step"] - LAST_STEPS]
    sparse = [line for line in lines if line["phase"] == "sparse"]
    return dict(
        heldout_loss=lines[-1]["eval_loss"],
        train_loss=statistics.fmean(last) if last else None,
        curve=[[line["tokens"], round(line["loss"], 4)] for line in finite],
        heldout_curve=[[line["tokens"], round(line["eval_loss"], 4)] for line in evaluated],
        last_sparse_step={
            name: value
            for name, value in (sparse[-1] if sparse else {}).items()
            if name in ("loss", "activation_sparsity", "kept_energy", "expert_load", "flip_rate", "kept_weight_energy")
        },
    )


def stop_in(minutes: float) -> None:
    """Ends the training under way as a polite kill would: its state is saved."""
    if math.isfinite(minutes):
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        signal.alarm(max(1, int(60 * minutes)))


def read_rows(output: pathlib.Path) -> list[dict]:
    """The runs that are finished."""
    return json.loads(output.read_text())["runs"] if output.exists() else []


def add_row(output: pathlib.Path, row: dict) -> None:
    """Adds a finished run, one script at a time."""
    with open(output.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = [*read_rows(output), row]
        tables = dict(suite=SUITE.value, base=SUITES[SUITE.value][0], runs=rows)
        with replacing(output) as partial:
            partial.write_text(json.dumps({**machine(), **tables}) + "\n")


def main(_) -> None:
    start = time.monotonic()
    stop_in(MINUTES.value)
    output = pathlib.Path(OUTPUT.value)
    names = [name.replace(";", ",") for name in RUNS.value] or list(SUITES[SUITE.value][1])
    for seed in map(int, SEEDS.value):
        for name in names:
            if any((row["name"], row["seed"]) == (name, seed) for row in read_rows(output)):
                continue
            workdir = pathlib.Path(WORKDIR.value, f"{re.sub('[^a-z0-9]+', '_', name.lower())}-{seed}")
            if (time.monotonic() - start) / 60 >= MINUTES.value or not train(
                config(SUITE.value, name, seed, DATA.value), str(workdir)
            ):
                return print(f"stopped before the end of {name}, seed {seed}; the same command goes on")
            row = dict(name=name, seed=seed, overrides=SUITES[SUITE.value][1][name], **read_run(workdir))
            add_row(output, row)
            print(f"{name}, seed {seed}: held-out {row['heldout_loss']:.4f}", flush=True)
    return None


if __name__ == "__main__":
    app.run(main)
