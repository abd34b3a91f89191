"""Trains a language model: dense, sparse, dense.

    python -m sparse_lm.train --config=configs/tiny.py [--workdir=runs/tiny] [--config.steps=200 ...]
                              [--profile_steps=100,105] [--wandb]

A run that finds its workdir half done goes on from its newest checkpoint, bit for bit as if it had
not stopped. At the end it prints the held-out loss and a sample. `--config.init_from=DIRECTORY` starts
from the weights of a transformers model, such as one that `sparse_lm.export` wrote.

`--config.mesh.data=8` takes the eight GPUs of one host. Over several hosts, the same command runs in
every process; `sparse_lm.training.mesh.processes` says how they find each other.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import app, flags
from ml_collections import config_flags
from ml_collections.config_flags import config_path

from sparse_lm import logs
from sparse_lm.config import ConfigError, parse
from sparse_lm.data.errors import DataError
from sparse_lm.generate import continue_text
from sparse_lm.training.determinism import request_determinism
from sparse_lm.training.loop import TooManyBadSteps, train
from sparse_lm.training.mesh import processes
from sparse_lm.training.mesh.processes import LaunchError
from sparse_lm.training.telemetry.wandb_run import WandbError, check_installed
from sparse_lm.training.workdir import WorkdirError, has_begun

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 200


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}")
    logs.configure()
    name = Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem
    workdir = flags.FLAGS.workdir or str(Path("runs", name))
    try:
        config = parse(flags.FLAGS.config)
        profile_steps = _profile_steps(config.steps)
        if config.deterministic:
            request_determinism()
        if flags.FLAGS.wandb:
            check_installed()
        processes.join()
        processes.check(config)
        with processes.silence_all_but_leader():
            finished = train(config, workdir, profile_steps, flags.FLAGS.wandb)
        if finished and jax.process_count() == 1:
            print("sample:")
            print(continue_text(workdir, SAMPLE_PROMPT, max_new_tokens=SAMPLE_TOKENS, temperature=0.7))
        if not finished:
            _exit_now()
    except (ConfigError, DataError, WorkdirError, WandbError, LaunchError, TooManyBadSteps) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:  # while data is prepared, say, or a second one in training
        sys.exit(f"interrupted{'' if has_begun(workdir) else ' before training began'}; the same command goes on")


def _exit_now() -> None:
    """Without waiting for a compilation that may be under way, and that Python would abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _profile_steps(steps: int) -> tuple[int, int]:
    """What --profile_steps says for a run of so many steps; (0, 0), which are none, if it is not given."""
    text = flags.FLAGS.profile_steps
    if text is None:
        return 0, 0
    match = re.fullmatch(r"(\d+),(\d+)", text)
    if not match or not int(match[1]) < int(match[2]) <= steps:
        sys.exit(f"--profile_steps={text}: must be first,end with first < end <= config.steps = {steps}")
    return int(match[1]), int(match[2])


def _define_flags() -> None:
    """Not on import: entry points have flags of the same names, and may be imported side by side."""
    config_flags.DEFINE_config_file("config", None, "Configuration file, such as configs/tiny.py.")
    flags.mark_flag_as_required("config")
    flags.DEFINE_string("workdir", None, "Directory of the run; runs/<config name> if not given.")
    flags.DEFINE_string("profile_steps", None, "first,end: steps first <= step < end are traced into the workdir.")
    flags.DEFINE_bool("wandb", False, "Log to Weights & Biases, too; WANDB_MODE=offline to the workdir only.")


def _parse_flags(argv: Sequence[str]) -> list[str]:
    """No config file, or an override of a key that it lacks, is one line; the file's own errors are as they are."""
    try:
        arguments = app.parse_flags_with_usage(argv)
        flags.FLAGS.config.lock()  # which raises what loading the file raised, if no override has
        return arguments
    except OSError as error:
        sys.exit(f"--config: {str(error).splitlines()[-1].strip()}")
    except (AttributeError, KeyError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if all(frame.filename != config_path.__file__ for frame in frames):  # where overrides look up their keys
            raise
        overrides = [argument for argument in argv if argument.startswith("--config.")]
        (message,) = error.args[0].args if isinstance(error.args[0], KeyError) else error.args
        sys.exit(f"unknown key in {' '.join(overrides)}: {' '.join(message.split())}")


if __name__ == "__main__":
    _define_flags()
    app.run(main, flags_parser=_parse_flags)
