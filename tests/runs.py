"""Small runs: their configuration, their metrics, crashes, and processes as a user starts them."""

import contextlib
import json
import pathlib
import subprocess
import sys
import time

import pytest

from sparse_lm import evaluate
from sparse_lm.data import pipeline
from sparse_lm.recipes import DENSE
from sparse_lm.training import evaluation, loop, run_data
from tests import small
from tests.command_lines import ROOT


def small_config(corpus, recipe="slices", **changes):
    changes = {"data.path": str(corpus), "data.cache_dir": str(corpus.parent / "cache"), **changes}
    return small.config(recipe, **changes)


def lines(workdir):
    """The whole lines of a run's metrics, which may be being written."""
    path = pathlib.Path(workdir, "metrics.jsonl")
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def trace(workdir):
    """Returns what must not depend on when a run was stopped: everything but times."""
    timed = ("step_time", "wall_time", "tokens_per_second", "mfu", "mfu_peak", "executed_utilisation", "executed_peak")
    return [{name: value for name, value in line.items() if name not in timed} for line in lines(workdir)]


class Crash(Exception):
    pass


def train_and_crash(config, workdir, before):
    """Trains until the run dies as it asks for the batch of a step."""
    original = pipeline.train_batches

    def batches(*args, start_step, **kwargs):
        for i, windows in enumerate(original(*args, start_step=start_step, **kwargs), start_step):
            if i == before:
                raise Crash
            yield windows

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        patch.setattr(run_data, "train_batches", batches)
        loop.train(config, str(workdir))


@contextlib.contextmanager
def compiled_once():
    """Runs and evaluations of one configuration share what they compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_trainer", lambda config: small.compiled(config)[0])
        patch.setattr(loop, "make_transitions", lambda config, *_: small.compiled(config)[1])
        made, make = {}, evaluation.Evaluation

        def cached(config, graphdef, bytes_per_token, recipe=DENSE, layout=None):
            key = small.computed(config), bytes_per_token.tobytes(), recipe, layout is None
            return made.get(key) or made.setdefault(key, make(config, graphdef, bytes_per_token, recipe, layout))

        patch.setattr(loop, "Evaluation", cached)
        patch.setattr(evaluate, "Evaluation", cached)
        yield


def flags(changes):
    return [f"--config.{name}={value}" for name, value in changes.items()]


def command(corpus, workdir, *overrides, recipe="slices"):
    """`python -m sparse_lm.train` of the small run, through a config file."""
    config_file = pathlib.Path(workdir).parent / "small_run.py"
    config_file.write_text(f"from tests import small\n\ndef get_config():\n    return small.config_dict({recipe!r})\n")
    arguments = [f"--config={config_file}", f"--workdir={workdir}", f"--config.data.path={corpus}", *overrides]
    return [sys.executable, "-m", "sparse_lm.train", *arguments]


def start_until(arguments, workdir, step, **kwargs):
    """Starts a run and returns its process once `step` is in its metrics."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(arguments, cwd=ROOT, text=True, **streams | kwargs)
    deadline = time.monotonic() + 240
    while not any(line["step"] >= step for line in lines(workdir)):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process
