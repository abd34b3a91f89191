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

import contextlib
import functools
import os
import re
import sys
from pathlib import Path

import jax
from absl import flags
from ml_collections import config_flags

from sparse_lm import config_flag, entry_point
from sparse_lm.config import parse
from sparse_lm.data.tokenizer import load_tokenizer
from sparse_lm.generate import continue_texts
from sparse_lm.training.environment import keep_programs, request_memory
from sparse_lm.training.loop import train
from sparse_lm.training.mesh import processes
from sparse_lm.training.run_data import open_run_data
from sparse_lm.training.telemetry.wandb_run import check_installed
from sparse_lm.training.workdir import has_begun, load_config

PROMPT_TOKENS, SAMPLE_TOKENS = 32, 200


def main() -> None:
    options = flags.FLAGS
    if not options.workdir and config_flag.run_name() is None:
        sys.exit("--workdir: must be given to repeat a run")
    workdir = options.workdir or str(Path("runs", config_flag.run_name()))
    try:
        config = parse(options.config)
        profiled = _profiled(config.steps)
        request_memory()
        if options.wandb:
            check_installed()
        with processes.joined():
            processes.check(config)
            keep_programs(workdir)
            speaks = processes.is_leader() and not options.quiet
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stdout if speaks else nowhere):
                finished = train(config, workdir, profiled, options.wandb)
                whole = jax.process_count() == 1 and config.mesh.data == config.mesh.devices  # a device holds the model
                if finished and whole and speaks:
                    _print_sample(workdir)
    except KeyboardInterrupt:  # while data is prepared, say
        sys.exit(f"interrupted{'; the same command goes on' if has_begun(workdir) else ' before training began'}")


def _print_sample(workdir: str) -> None:
    data = open_run_data(workdir, load_config(workdir))
    given = min(PROMPT_TOKENS, data.seq_len // 2)
    prompt = load_tokenizer(data.tokenizer_path).decode(data.heldout[0][:given].tolist())
    room = data.seq_len - given  # in what the model was trained on
    [text] = continue_texts(workdir, [prompt], max_new_tokens=min(SAMPLE_TOKENS, room), temperature=0.7)
    print(f"held-out text:\n{prompt}\ncontinued:\n{text.removeprefix(prompt)}")


def _profiled(steps: int) -> range:
    if flags.FLAGS.profile_steps is None:
        return range(0)
    match = re.fullmatch(r"(\d+),(\d+)", flags.FLAGS.profile_steps)
    if not match or not int(match[1]) < int(match[2]) <= steps:
        allowed = f"must be first,end with first < end <= config.steps = {steps}"
        sys.exit(f"--profile_steps={flags.FLAGS.profile_steps}: {allowed}")
    return range(int(match[1]), int(match[2]))


def _define_flags() -> None:
    help_text = "Configuration: a file such as configs/tiny.py, or config.json of a run to repeat."
    config_flags.DEFINE_config_file("config", None, help_text)  # which `config_flag.parse_flags` must parse
    flags.register_validator("config", lambda value: value is not None, "must name a file, such as configs/tiny.py")
    flags.DEFINE_string("workdir", None, "Directory of the run; runs/<config name> if not given.")
    flags.DEFINE_string("profile_steps", None, "first,end: steps first <= step < end are traced into the workdir.")
    flags.DEFINE_bool("wandb", False, "Log to Weights & Biases, too; WANDB_MODE=offline to the workdir only.")
    flags.DEFINE_bool("quiet", False, "Print warnings and errors only.")


_LESS = "more config.microbatches, config.model.remat = 'full', a smaller config.batch_size, or config.mesh.fsdp"
cli = functools.partial(entry_point.run, main, _define_flags, config_flag.parse_flags, takes_less_memory=_LESS)

if __name__ == "__main__":
    cli()
