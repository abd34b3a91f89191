"""Trains a language model: dense, sparse, dense.

    python -m sparse_lm.train --config=configs/tiny.py [--workdir=runs/tiny] [--config.steps=200 ...]

A run that finds its workdir half done goes on from its newest checkpoint, bit for bit as if it had
not stopped. At the end it prints the held-out loss and a sample.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

from sparse_lm import logs
from sparse_lm.config import ConfigError, parse
from sparse_lm.data import DataError
from sparse_lm.generate import continue_text
from sparse_lm.training.loop import TooManyBadSteps, train
from sparse_lm.training.workdir import WorkdirError

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 200

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file, such as configs/tiny.py.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run; runs/<config name> if not given.")
flags.mark_flag_as_required("config")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}")
    logs.configure()
    name = Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem
    workdir = _WORKDIR.value or str(Path("runs", name))
    try:
        config = parse(_CONFIG.value)
        if train(config, workdir):
            new_tokens = min(200, config.seq_len - 8)
            print(
                "sample:", continue_text(workdir, SAMPLE_PROMPT, max_new_tokens=new_tokens, temperature=0.7), sep="\n"
            )
    except (ConfigError, DataError, WorkdirError, TooManyBadSteps) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    app.run(main)
