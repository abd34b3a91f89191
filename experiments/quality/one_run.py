"""Trains one run of a suite and writes what it took and reached to row.json in its workdir.

`experiments.quality.time_to_loss` starts this, a process a run:

    python -m experiments.quality.one_run --suite=tiny --run=slices_50 --seed=0 --data=data/python --root=runs/tiny

"dense@0.8" is the dense run of that length; it goes on from a checkpoint of the longest one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

from absl import app, flags

from experiments.quality import controls
from experiments.quality.suites import ROW, SUITES, Suite, phase_start
from sparse_lm.config import Config
from sparse_lm.data.opening import open_data
from sparse_lm.entry_point import configure_logs
from sparse_lm.errors import WorkdirError
from sparse_lm.evaluate import evaluate
from sparse_lm.files import replacing
from sparse_lm.training.checkpoints.saved_checkpoint import saved_checkpoints
from sparse_lm.training.loop import train
from sparse_lm.training.run_data import FILE as DATA
from sparse_lm.training.telemetry.metrics import FILE as METRICS
from sparse_lm.training.telemetry.metrics import read_metrics, to_json
from sparse_lm.training.telemetry.summary import read_summary
from sparse_lm.training.workdir import save_config, workdir_lock

_LOGGED = 200  # steps between those whose metrics a row has


def run_one(suite: Suite, name: str, seed: int, data: str, second_data: str, root: Path) -> bool:
    """Trains, or goes on, and writes the row; returns False, without one, if a signal stopped the run.

    Raises:
      WorkdirError: another process trains it.
    """
    workdir, longest = root / f"{name}-{seed}", root / f"{suite.longest}-{seed}"
    config, before = suite.config(name, seed, data), None
    with workdir_lock(workdir):
        (workdir / ROW).unlink(missing_ok=True)
        begins_anew = not saved_checkpoints(workdir)
    if begins_anew:  # without the seconds of what was there
        shutil.rmtree(workdir)
    if start := suite.branch_start(name):
        start_from(longest, workdir, config, start)
        before = first_steps_of(read_summary(longest), start)
    if not train(config, str(workdir)):
        return False
    row = dict(name=name, seed=seed, **read_run(workdir, config, before))
    if second_data:
        other = evaluate(str(workdir), data=second_data, windows=config.data.eval_windows)
        row["second_heldout_loss"] = other["loss"]
        row["second_corpus_sha256"] = open_data(suite.config(name, seed, second_data)).info["corpus_sha256"][:12]
    with replacing(workdir / ROW) as partial:
        partial.write_text(json.dumps(row) + "\n")
    return True


def first_steps_of(summary: dict[str, Any], steps: int) -> dict[str, Any]:
    """Returns what the first `steps` steps of a dense run took, whose steps all take alike; it compiles once."""
    taken = sum(process["steps"].get("dense", 0) for process in summary["processes"])
    return dict(seconds=summary["seconds"]["dense"] * steps / taken, compile_seconds=compile_seconds(summary))


def compile_seconds(summary: dict[str, Any]) -> float:
    """Returns what a run takes to compile: all of it is before the first step, and again only where it was stopped."""
    return next(process["seconds"]["compile"] for process in summary["processes"] if process["steps"])


def start_from(source: Path, workdir: Path, config: Config, step: int) -> None:
    """Makes a workdir, unless there is one, as a run of `config` that was stopped at that step would have left it.

    The run of `source` took these steps; its checkpoint is linked.

    Raises:
      WorkdirError: that run has no such checkpoint.
    """
    if workdir.exists():
        return
    if step not in saved_checkpoints(source):
        raise WorkdirError(source, f"has no checkpoint of step {step}, from which {workdir.name} goes on")
    partial = workdir.with_name(f"{workdir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    checkpoint = f"checkpoints/{step}"
    shutil.copytree(source / checkpoint, partial / checkpoint, copy_function=os.link)
    for file in ("data.json", "tokenizer.json"):
        shutil.copy(source / file, partial / file)
    lines = [line for line in read_metrics(source) if line["step"] < step]
    (partial / METRICS).write_text("".join(f"{to_json(line)}\n" for line in lines))
    save_config(partial, config)
    partial.rename(workdir)


def read_run(workdir: Path, config: Config, before: dict[str, Any] | None) -> dict[str, Any]:
    """Returns what a finished run took and reached.

    Its seconds are those of the training steps, with what training does between them: data, metrics, transitions,
    refreshes. Compilation is beside them; evaluating and saving count nowhere. `first_dense_ms` is the time of a step
    before any phase begins, which is the same program in all runs of a model and so tells their GPUs apart.

    Raises:
      WorkdirError: the last step was one too many that was skipped, so that the run ended without its last evaluation,
        or that loss is not finite; or steps were taken twice, so that its seconds are those of more steps than it has.
    """
    summary, lines = read_summary(workdir), list(read_metrics(workdir))
    if lines[-1]["step"] != config.steps - 1 or lines[-1].get("eval_loss") is None:
        raise WorkdirError(workdir, f"has no held-out loss of the last step: {summary['state']}")
    phases = {phase: summary["seconds"].get(phase, 0.0) for phase in ("dense", "sparse")}
    processes = summary["processes"]
    before = before or dict(seconds=0.0, compile_seconds=compile_seconds(summary))
    steps = {phase: sum(process["steps"].get(phase, 0) for process in processes) for phase in phases}
    if (taken := sum(steps.values())) != (due := config.steps - processes[0]["start_step"]):
        raise WorkdirError(workdir, f"took {taken} steps, where {due} were due: delete it, and train anew")
    sparse = [line for line in lines if line["phase"] == "sparse"]
    sampled = [line for line in lines if line["step"] % _LOGGED == 0]
    first = [line["step_time"] for line in lines if line.get("step_time") and line["step"] < phase_start(config.steps)]
    return dict(
        steps=config.steps,
        tokens=config.steps * config.tokens_per_step,
        tokens_per_step=config.tokens_per_step,
        seconds=before["seconds"] + sum(phases.values()),
        compile_seconds=before["compile_seconds"],
        cached_compilation=bool(os.environ.get("JAX_COMPILATION_CACHE_DIR")),
        phase_steps=steps,
        step_ms={phase: 1e3 * phases[phase] / steps[phase] for phase in phases if steps[phase]},
        sparse_steps=[config.sparsity.start_step, config.sparsity.end_step] if sparse else None,
        heldout_loss=lines[-1]["eval_loss"],
        heldout_curve=[[line["tokens"], line["eval_loss"]] for line in lines if line.get("eval_loss") is not None],
        skipped=summary["skipped"],
        expert_load=sparse[-1].get("expert_load") if sparse else None,
        logged=[[line[key] for key in ("step", "phase", "loss", "step_time")] for line in sampled],
        first_dense_ms=1e3 * statistics.fmean(first) if first else None,
        model=dataclasses.asdict(config.model),
        corpus_sha256=json.loads((workdir / DATA).read_text())["corpus_sha256"][:12],
        gpu=os.environ.get("CUDA_VISIBLE_DEVICES"),
        **{key: processes[-1][key] for key in ("started", "device", "versions", "git_commit")},
    )


def main(_) -> None:
    configure_logs()
    controls.register()
    values = flags.FLAGS
    run_one(SUITES[values.suite], values.run, values.seed, values.data, values.second_data, Path(values.root))


if __name__ == "__main__":
    flags.DEFINE_enum("suite", None, list(SUITES), "Set of runs.", required=True)
    flags.DEFINE_string("run", None, "Name of a run.", required=True)
    flags.DEFINE_integer("seed", 0, "Its seed.")
    flags.DEFINE_string("data", None, "Prepared corpus.", required=True)
    flags.DEFINE_string("second_data", "", "Prepared corpus of other text with the same tokenizer; empty for none.")
    flags.DEFINE_string("root", None, "Directory of the workdirs.", required=True)
    app.run(main)
