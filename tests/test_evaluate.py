"""The entry point, on a workdir and a corpus made by hand."""

import dataclasses
import errno
import functools
import json
import math
import re
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from sparse_lm.config import Config, DataConfig, ModelConfig, SparsityConfig
from sparse_lm.data.opening import open_data
from sparse_lm.data.pipeline import heldout_batches
from sparse_lm.data.tokenizer import train_tokenizer
from sparse_lm.errors import ConfigError, DataError, OutputError, WorkdirError
from sparse_lm.evaluate import evaluate, evaluate_tasks
from sparse_lm.interop.harness.text_model import HarnessError
from sparse_lm.model import llama
from sparse_lm.recipes import SSte
from sparse_lm.recipes.soft_threshold import Scales
from sparse_lm.training.checkpoints.checkpoint import Checkpoints, restore_params
from sparse_lm.training.evaluation import Evaluation
from sparse_lm.training.transitions import dense_params
from sparse_lm.training.workdir import load_config, save_config
from tests.command_lines import assert_refused, run_each
from tests.interop.harness.examples import write_choice_task
from tests.interop.models import save_run

MODEL = ModelConfig(dim=16, layers=2, heads=2, kv_heads=2, ffn_dim=32, vocab_size=300, dtype="float32")
SPARSITY = SparsityConfig(recipe=SSte(), start_step=10, end_step=30)
SCALES = Scales(np.float32([1.5, 1.2]), np.float32([1.3, 1.6]))  # of each layer


@pytest.fixture(scope="module")
def workdir(corpus, tmp_path_factory):
    """Checkpoints of steps 20 (the best) and 30, of random weights."""
    path = tmp_path_factory.mktemp("run")
    config = Config(batch_size=5, seq_len=32, model=MODEL, sparsity=SPARSITY, data=DataConfig(path=str(corpus)))
    save_run(path, config, {20: 1.0, 30: 2.0}, SCALES)
    shutil.copy(corpus / "tokenizer.json", path)
    shutil.copy(corpus / "metadata.json", path / "data.json")  # its corpus_sha256 is read
    return path


MISTAKES = {
    ("--checkpoint=newest",): "must be latest, best or a step",
    ("--data=",): "--data=: must not be empty",
    ("--tasks=arc_easy", "--sparse"): "--sparse: tasks are evaluated with dense FFNs",
    ("--tasks=arc_easy", "--data=data/other"): "--data: tasks bring their own",
    ("--limit=3",): "--limit: is for tasks; name some with --tasks\n",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tasks")
    write_choice_task(directory, "quiz", count=9, answer_words=2)
    return directory


@pytest.fixture(scope="module")
def command_lines(workdir, tasks, tmp_path_factory):
    """Runs the command for the held-out loss, for tasks, and with each mistake."""
    of_tasks = ["--tasks=quiz", f"--include_path={tasks}", "--limit=6", "--num_fewshot=1", "--checkpoint=best"]
    given = [[f"--workdir={workdir}"], [f"--workdir={workdir}", *of_tasks, "--samples"]]
    given += [["--workdir=/nowhere", *flags] for flags in MISTAKES]
    return run_each("sparse_lm.evaluate", given, tmp_path_factory.mktemp("outputs"))


@pytest.mark.long
def test_last_line_is_one_json_object(workdir, command_lines):
    result = json.loads(command_lines[0].stdout.splitlines()[-1])
    assert set(result) == {"step", "loss", "perplexity", "bits_per_byte"}
    assert result["step"] == 30
    assert result["loss"] == pytest.approx(math.log(300), rel=0.5)  # of random weights
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result == evaluate(workdir)


def test_mistakes_get_a_clear_line(command_lines):
    for message, run in zip(MISTAKES.values(), command_lines[2:], strict=True):
        assert_refused(run, message)


def test_every_held_out_window_counts_however_few_training_evaluates(workdir, tmp_path):
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    config = load_config(workdir)
    save_config(tmp_path, dataclasses.replace(config, data=dataclasses.replace(config.data, eval_windows=1)))
    assert evaluate(tmp_path) == evaluate(workdir)


def test_dense_evaluation_of_the_sparse_phase_reads_the_weights_that_it_trained(workdir, caplog):
    """Products of S-STE's weights give one loss, dense or sparse; the master weights give another."""
    sparse = evaluate(workdir, 20, sparse=True)
    assert not caplog.text
    dense = evaluate(workdir, 20)
    assert "step 20 is of the sparse phase: FFNs are computed densely" in caplog.text
    assert dense["loss"] == pytest.approx(sparse["loss"], rel=1e-6)
    config, (params, _, _) = load_config(workdir), restore_params(workdir, 20)
    data = open_data(config)
    evaluation = Evaluation(config, llama.graphdef(MODEL), data.bytes_per_token)
    of_master_weights = evaluation(params, None, heldout_batches(data, batch_size=5))
    assert abs(of_master_weights["loss"] - dense["loss"]) > 1e-3


def test_another_corpus_of_the_same_tokenizer(workdir, corpus, other_corpus, tmp_path):
    other = evaluate(workdir, data=str(other_corpus))
    assert other["step"] == 30
    assert abs(other["loss"] - evaluate(workdir)["loss"]) > 1e-4
    assert evaluate(workdir, 20, data=str(corpus)) == evaluate(workdir, 20)
    with pytest.raises(DataError, match=r"^--data=/nowhere: /nowhere does not exist$"):
        evaluate(workdir, data="/nowhere")
    (tmp_path / "checkpoints").symlink_to(workdir / "checkpoints")
    save_config(tmp_path, dataclasses.replace(load_config(workdir), seq_len=16))
    with pytest.raises(DataError, match=r"^--data=.*: must be prepared with --seq_len=16, as the run's data was$"):
        evaluate(tmp_path, data=str(other_corpus))


def test_sparse_evaluation_after_the_sparse_phase_fits_beta_to_the_weights(workdir, tmp_path):
    """Weights that left the phase are 2:4, so that sparse products change nothing: beta must not count twice."""
    for file in ("config.json", "data.json"):
        shutil.copy(workdir / file, tmp_path)
    config = load_config(workdir)
    params, by_name, _ = restore_params(workdir, 20)
    scales = Scales(**by_name)
    left = jax.jit(functools.partial(dense_params, sparsity=SPARSITY))(params, scales)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(config.steps, {"params": left, "recipe_state": scales})
    assert evaluate(tmp_path)["loss"] == pytest.approx(evaluate(tmp_path, sparse=True)["loss"], rel=1e-6)


def test_sparse_of_a_dense_checkpoint_is_refused(workdir, tmp_path):
    config = load_config(workdir)
    save_run(tmp_path, config, {10: 1.0}, SCALES)
    with pytest.raises(WorkdirError, match="needs a checkpoint after step 10"):
        evaluate(tmp_path, sparse=True)
    dense = dataclasses.replace(SPARSITY, start_step=0, end_step=0)
    save_config(tmp_path, dataclasses.replace(config, sparsity=dense))
    with pytest.raises(WorkdirError, match="dense throughout"):
        evaluate(tmp_path, sparse=True)


def test_data_with_another_tokenizer_is_refused(workdir, tmp_path):
    shutil.copy(workdir / "config.json", tmp_path)
    (tmp_path / "checkpoints").symlink_to(workdir / "checkpoints")
    train_tokenizer(["other words"] * 8, vocab_size=280).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=rf"data\.path = .* has another tokenizer than the run in {tmp_path};"):
        evaluate(tmp_path)
    with pytest.raises(DataError, match=rf"--data=.* has another tokenizer .*; prepare it with --tokenizer={tmp_path}"):
        evaluate(tmp_path, data=load_config(workdir).data.path)


def test_other_text_in_the_place_of_the_runs_is_refused_unless_it_is_named(workdir, corpus, tmp_path):
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "data.json").write_text(json.dumps({"corpus_sha256": 64 * "0"}))
    with pytest.raises(ConfigError, match=rf"data\.path = .* has other text \(sha256 .*\) than the run in {tmp_path};"):
        evaluate(tmp_path)
    assert evaluate(tmp_path, data=str(corpus)) == evaluate(workdir)
    (tmp_path / "data.json").unlink()
    with pytest.raises(WorkdirError, match=r"data\.json cannot be read"):
        evaluate(tmp_path)


def test_tasks_from_the_command_line(workdir, tasks, command_lines, tmp_path):
    """Of a checkpoint by name; the scores are in a file too. All that is random is seeded."""
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -r requirements-test.txt")
    run = command_lines[1]
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["step"] == 20
    assert set(result["results"]["quiz"]) == {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr"}
    assert re.search(rf"\|quiz *\|.*\|acc +\|.*\|{result['results']['quiz']['acc']:.4f}\|", run.stdout)
    (written,) = (workdir / "tasks").glob("step_20_*.json")
    assert str(written) in run.stderr
    report = json.loads(written.read_text())
    assert report["results"] == result["results"]
    assert report["n-samples"]["quiz"] == {"original": 9, "effective": 6}
    assert report["n-shot"]["quiz"] == 1
    assert len(report["samples"]["quiz"]) == 6

    options = dict(include_path=tasks, limit=6, num_fewshot=1, output=tmp_path / "a" / "b.json")
    again = evaluate_tasks(workdir, ["quiz"], "best", **options)
    assert json.loads((tmp_path / "a" / "b.json").read_text())["results"] == again["results"]
    assert again["results"]["quiz"] == pytest.approx(result["results"]["quiz"])


def test_a_disk_that_fills_up_meanwhile_leaves_no_part_of_the_scores(workdir, tasks, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -r requirements-test.txt")

    def fill(path, text, **_):
        path.write_bytes(text[:10].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sparse_lm.interop.harness.tasks.score_tasks", lambda *_, **__: ({"results": {}}, ""))
    with monkeypatch.context() as full, pytest.raises(OutputError, match="cannot be written: No space left on device"):
        full.setattr(Path, "write_text", fill)
        evaluate_tasks(workdir, ["quiz"], include_path=tasks, output=tmp_path / "scores.json")
    assert not list(tmp_path.iterdir())


def test_scores_that_cannot_be_written_are_refused_before_any_are_made(workdir, tmp_path):
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -r requirements-test.txt")
    with pytest.raises(OutputError, match=r"^--output=.*: is a directory; must be a file$"):
        evaluate_tasks(workdir, ["arc_easy"], output=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"^--output=.*/file/scores\.json: cannot be written: "):
        evaluate_tasks(workdir, ["arc_easy"], output=tmp_path / "file" / "scores.json")


def test_tasks_without_the_harness_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(HarnessError, match=r"--tasks needs .*: pip install 'lm_eval>="):
        evaluate_tasks("/nowhere", ["arc_easy"])
