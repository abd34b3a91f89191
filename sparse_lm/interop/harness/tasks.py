"""Tasks of the harness by name, and what a model scores in them."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict
from lm_eval.utils import make_table

from sparse_lm.interop.harness.adapter import HarnessModel
from sparse_lm.interop.harness.text_model import HarnessError, TextModel

GROUPS = {
    "paper": (
        "arc_challenge", "arc_easy", "boolq", "hellaswag", "lambada_openai", "openbookqa", "piqa", "race", "record",
        "sciq",
    )
}  # fmt: skip
"""Lists of tasks under one name. `paper` is what 2602.06183 evaluates its models on."""

BOOTSTRAP_ITERATIONS = 1000  # for the standard errors of what is no mean; they are then good to 2%
# As in the harness's own command: of Python's and NumPy's generators, which tasks may draw from, and of examples.
RANDOM_SEED, NUMPY_SEED, FEWSHOT_SEED = 0, 1234, 1234


def load_tasks(names: Sequence[str], include_path: str | os.PathLike | None) -> TaskDict:
    """Loads tasks by name, with their data, which the harness downloads if need be.

    Names are of tasks, tags and groups of the harness, patterns of such names, or of `GROUPS`. `include_path` is a
    directory with task files of one's own, which come before the harness's.

    Raises:
      HarnessError: there is no such task or directory, a task file has a mistake, or its data cannot be had.
    """
    random.seed(RANDOM_SEED)
    np.random.seed(NUMPY_SEED)
    names = [task for name in names for task in GROUPS.get(name, [name])]
    if include_path is not None:
        if not Path(include_path).is_dir():
            raise HarnessError(f"--include_path={os.fspath(include_path)}: must be a directory of task files")
        own = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(own.all_subtasks):  # the harness's own are many: to look through them takes ten seconds
            return _load(own, names)
    manager = TaskManager(include_path=include_path)
    for name in names:
        if not manager.match_tasks([name]):
            raise HarnessError(f"--tasks={name}: lm-eval {version('lm_eval')} has no such task, nor has --include_path")
    return _load(manager, manager.match_tasks(names))


def _load(manager: TaskManager, names: Sequence[str]) -> TaskDict:
    try:
        return manager.load(names)
    except Exception as error:  # a task file names templates, functions and data, which raise what they like
        raise _refusal(names, error) from error


def _refusal(names: Iterable[str], error: Exception) -> HarnessError:
    reason = " ".join(str(error).split())
    if not isinstance(error, (OSError, ValueError)):  # others say less: "'train'" for a split that is not there
        reason = f"{type(error).__name__}: {reason}"
    return HarnessError(f"--tasks={','.join(names)}: {reason}")


def score_tasks(
    model: TextModel, tasks: TaskDict, *, num_fewshot: int | None, limit: int | None, samples: bool
) -> tuple[dict[str, Any], str]:
    """Scores a model in tasks that `load_tasks` returned, on their first `limit` questions, or all.

    `num_fewshot` examples are before each question, what a task says for None; a task that says 0 keeps it. With
    `samples` the report has every question and answer, too.

    Returns:
      The harness's report, "results" by task and metric, "n-shot", "n-samples", "versions", "configs" and more, and
      its table of the results.

    Raises:
      HarnessError: a task asks for what the model cannot do, or has a template that a document does not fill.
    """
    for task in tasks["tasks"].values():
        configured = task.get_config("num_fewshot")
        if num_fewshot is not None and configured != 0:
            task.set_config("num_fewshot", num_fewshot)
        elif configured is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    # Else the harness forks, which can hang a process that runs JAX.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    adapter = HarnessModel(model)
    try:
        report = evaluate(adapter, tasks, limit=limit, bootstrap_iters=BOOTSTRAP_ITERATIONS, log_samples=samples)
    except TemplateError as error:
        raise _refusal(tasks["tasks"], error) from error
    table = make_table(report)
    report["results"] = {task: _numbers(metrics) for task, metrics in report["results"].items()}
    return {**report, "lm_eval_version": version("lm_eval")}, table


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Names metrics "acc", or "exact_match,strict-match" if the task filters answers; what is no number is None."""
    return {
        name.removesuffix(",none"): float(value) if value != "N/A" and math.isfinite(value) else None
        for name, value in metrics.items()
        if "," in name  # others describe the task
    }
