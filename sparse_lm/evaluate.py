"""Held-out loss of a trained model.

    python -m sparse_lm.evaluate --workdir=runs/tiny [--checkpoint=best] [--sparse]

The last line of standard output is one JSON object: step, loss (nats per token), perplexity and
bits_per_byte, over the whole held-out split.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import app, flags

from sparse_lm import logs
from sparse_lm.checkpoint_flag import define_checkpoint_flag
from sparse_lm.config import ConfigError
from sparse_lm.data import DataError, heldout_batches, open_data
from sparse_lm.model import llama
from sparse_lm.ops.ffn import FfnVariables
from sparse_lm.ops.plan import DENSE
from sparse_lm.training.evaluation import make_evaluation
from sparse_lm.training.metrics import to_json
from sparse_lm.training.recipe import sparse_plan
from sparse_lm.training.restored import restore_for_dense, restore_for_sparse
from sparse_lm.training.workdir import WorkdirError, load_config


def evaluate(workdir: str, checkpoint: int | str = "latest", sparse: bool = False) -> dict[str, float]:
    """Step, loss, perplexity and bits_per_byte of a checkpoint, dense or as the sparse phase computes.

    Raises:
      WorkdirError: the workdir has no such checkpoint, or none with sparse variables.
      ConfigError, DataError: the run's configuration or data cannot be used any more.
    """
    config = load_config(workdir)
    if sparse:
        params, variables, step = restore_for_sparse(workdir, config, checkpoint)
        plan = sparse_plan(config.sparsity)
    else:
        params, step = restore_for_dense(workdir, config, checkpoint)
        variables, plan = FfnVariables(), DENSE
    data = open_data(config)
    evaluation = make_evaluation(config, llama.graphdef(config.model), data.bytes_per_token, plan)
    batches = heldout_batches(data, batch_size=config.batch_size, windows=0)
    return {"step": step, **evaluation(params, variables, batches)}


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}")
    logs.configure()
    options = flags.FLAGS
    try:
        result = evaluate(options.workdir, options.checkpoint, sparse=options.sparse)
    except (ConfigError, DataError, WorkdirError) as error:
        sys.exit(str(error))
    print(to_json(result))


def _define_flags() -> None:
    """Not on import: entry points have flags of the same names, and may be imported side by side."""
    flags.DEFINE_string("workdir", None, "Directory of the run.", required=True)
    define_checkpoint_flag()
    flags.DEFINE_bool("sparse", False, "Compute the FFNs as the run's sparse phase does, instead of densely.")


if __name__ == "__main__":
    _define_flags()
    app.run(main)
