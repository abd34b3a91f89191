"""Measures the held-out loss of a trained model, or scores it in tasks of EleutherAI's evaluation harness.

    python -m sparse_lm.evaluate --workdir=runs/tiny [--checkpoint=best] [--sparse] [--data=data/other]
    python -m sparse_lm.evaluate --workdir=runs/tiny --tasks=arc_challenge,hellaswag [--include_path=my_tasks]
                                 [--num_fewshot=5] [--limit=100] [--samples] [--output=scores.json]

The last line of standard output is one JSON object: step, loss (nats per token), perplexity and bits_per_byte, over
the whole held-out split; or step and results, the metrics of each task, below the harness's table of them. `--data`
names another corpus that was prepared with the run's tokenizer. `--tasks=paper` is all tasks that 2602.06183 evaluates.

Scores of tasks also go, with all that the harness reports of how they were made, to a file in the workdir's `tasks/`;
with `--samples` every question and answer does. Tasks need lm-eval, which is in requirements-test.txt, and compute
FFNs densely.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.util
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from sparse_lm import entry_point
from sparse_lm.data.pipeline import heldout_batches
from sparse_lm.data.tokenizer import end_of_text, load_tokenizer
from sparse_lm.errors import ConfigError, DataError, OutputError
from sparse_lm.files import replacing, writing
from sparse_lm.interop.harness.text_model import HarnessError, TextModel
from sparse_lm.model import llama
from sparse_lm.training.checkpoints.restored import restore_for_dense, restore_for_sparse, restore_model
from sparse_lm.training.environment import check_implementation
from sparse_lm.training.evaluation import Evaluation
from sparse_lm.training.run_data import check_same_data, check_same_tokenizer, open_run_data
from sparse_lm.training.telemetry.metrics import to_json
from sparse_lm.training.workdir import load_config

_log = logging.getLogger(__name__)

BATCH_TOKENS = 16_384
TASK_FLAGS = ("include_path", "num_fewshot", "limit", "samples", "batch_tokens", "output")


def evaluate(
    workdir: str,
    checkpoint: int | str = "latest",
    sparse: bool = False,
    data: str | None = None,
    windows: int = 0,
) -> dict[str, float]:
    """Evaluates a checkpoint on held-out text: as the model that it is, or as the sparse phase computes.

    `checkpoint` is "latest", "best" (least held-out loss in training) or a step. `data` is a prepared corpus with the
    run's tokenizer; None for the run's own. `windows` is how many held-out windows are read, spread evenly; 0 for all.

    Returns:
      step, loss, perplexity and bits_per_byte, as `Evaluation` defines them.

    Raises:
      WorkdirError: the workdir has no such checkpoint, or no sparse phase before it.
      ConfigError, DataError: the run's configuration or data cannot be used any more.
      DataError: `data` is no prepared corpus with the run's tokenizer and sequence length.
    """
    config = load_config(workdir)
    if data is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=data))
    if sparse:
        recipe = config.sparsity.recipe
        check_implementation(recipe)
        params, recipe_state, step = restore_for_sparse(workdir, config, checkpoint)
    else:
        params, recipe, recipe_state, step = restore_model(workdir, config, checkpoint)
    try:
        opened = open_run_data(workdir, config)
        (check_same_data if data is None else check_same_tokenizer)(workdir, config, opened)
    except ConfigError as error:
        if data is None or error.key not in ("data.path", "seq_len"):
            raise
        of_length = f"must be prepared with --seq_len={config.seq_len}, as the run's data was"
        raise DataError(f"--data={data}: {of_length if error.key == 'seq_len' else error.allowed}") from error
    evaluation = Evaluation(config, llama.graphdef(config.model), opened.bytes_per_token, recipe)
    batches = heldout_batches(opened, batch_size=evaluation.batch_size, windows=windows)
    return {"step": step, **evaluation(params, recipe_state, batches)}


def evaluate_tasks(
    workdir: str | os.PathLike,
    tasks: Sequence[str],
    checkpoint: int | str = "latest",
    *,
    include_path: str | os.PathLike | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    samples: bool = False,
    batch_tokens: int = BATCH_TOKENS,
    output: str | os.PathLike | None = None,
) -> dict[str, Any]:
    """Scores a checkpoint in tasks of the harness; prints their table and writes a file.

    Arguments are the flags of the same names. Of the run, tokenizer and checkpoint are read, data is not.

    Returns:
      "step", and "results": metrics and their standard errors, by task.

    Raises:
      HarnessError: lm-eval is not installed, or a task does not exist or cannot be done.
      OutputError: the file cannot be written.
      WorkdirError: the workdir has no such checkpoint.
      ConfigError, DataError: the run's configuration or tokenizer cannot be used.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise HarnessError("--tasks needs EleutherAI's harness: pip install 'lm_eval>=0.4.13,<0.5'")
    from sparse_lm.interop.harness.tasks import load_tasks, score_tasks  # not everywhere installed, and slow to import

    model, step = text_model(workdir, checkpoint, batch_tokens)
    now = datetime.datetime.now(datetime.UTC)  # one checkpoint may be evaluated many times
    file = Path(output or Path(workdir, "tasks", f"step_{step}_{now:%Y%m%dT%H%M%SZ}.json"))
    if file.is_dir():
        raise OutputError(file, "is a directory; must be a file")
    with writing(OutputError, file):
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=file.parent).close()  # now, not after an evaluation of hours
    loaded = load_tasks(tasks, include_path)
    scores, table = score_tasks(model, loaded, num_fewshot=num_fewshot, limit=limit, samples=samples)
    print(table)
    report = {"step": step, "limit": limit, **scores}
    with writing(OutputError, file), replacing(file) as partial:
        partial.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
    _log.info("scores are in %s", file)
    return {"step": step, "results": report["results"]}


def text_model(workdir: str | os.PathLike, checkpoint: int | str, batch_tokens: int) -> tuple[TextModel, int]:
    """Restores a checkpoint for the harness; returns it with its step. See `evaluate_tasks` for the rest."""
    config = load_config(workdir)
    tokenizer = load_tokenizer(Path(workdir, "tokenizer.json"))
    params, step = restore_for_dense(workdir, config, checkpoint)
    # Several shapes are compiled, each for little work: one layer compiles sooner than all.
    graphdef = llama.graphdef(dataclasses.replace(config.model, unroll_layers=False))
    return TextModel(graphdef, params, tokenizer, end_of_text(tokenizer), config.seq_len, batch_tokens), step


def main() -> None:
    options = flags.FLAGS
    if options.tasks:
        if options.sparse:
            raise HarnessError("--sparse: tasks are evaluated with dense FFNs; leave out --sparse or --tasks")
        if options.data:
            raise HarnessError("--data: tasks bring their own; leave out --data or --tasks")
        of_tasks = {name: options[name].value for name in TASK_FLAGS}
        result = evaluate_tasks(options.workdir, options.tasks, options.checkpoint, **of_tasks)
    else:
        for name in TASK_FLAGS:
            if options[name].present:
                raise HarnessError(f"--{name}: is for tasks; name some with --tasks")
        result = evaluate(options.workdir, options.checkpoint, options.sparse, options.data)
    print(to_json(result))


def _define_flags() -> None:
    entry_point.define_run_flags()
    flags.DEFINE_bool("sparse", False, "Compute the FFNs as the sparse phase does, also where the model is dense.")
    flags.DEFINE_string("data", None, "Another prepared corpus to evaluate on, with the run's tokenizer.")
    flags.DEFINE_list("tasks", [], "Tasks of the harness to evaluate, instead of the held-out loss; or `paper`.")
    flags.DEFINE_string("include_path", None, "Directory with task files of one's own.")
    flags.DEFINE_integer(
        "num_fewshot", None, "Examples before each question, unless a task says 0; by default what it says.", 0
    )
    flags.DEFINE_integer("limit", None, "Questions of each task; all if not given.", 1)
    flags.DEFINE_bool("samples", False, "Write every question and answer of the tasks, too.")
    flags.DEFINE_integer("batch_tokens", BATCH_TOKENS, "Tokens to compute at one time in tasks.", 1)
    flags.DEFINE_string("output", None, "File for the scores of tasks; one in the workdir's tasks/ if not given.")


_LESS = "a smaller --batch_tokens, with tasks"
cli = functools.partial(entry_point.run, main, _define_flags, takes_less_memory=_LESS)

if __name__ == "__main__":
    cli()
