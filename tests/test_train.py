"""Whole runs: resumed after a kill, a crash or a signal, they are the run that was never stopped."""

import dataclasses
import functools
import math
import os
import signal
import sys

import jax
import numpy as np
import pytest

from sparse_lm.data.opening import open_data
from sparse_lm.data.pipeline import heldout_batches
from sparse_lm.errors import ConfigError
from sparse_lm.evaluate import evaluate
from sparse_lm.generate import continue_texts
from sparse_lm.progress import Progress
from sparse_lm.report import report
from sparse_lm.training import loop, run_data
from sparse_lm.training.checkpoints.checkpoint import Checkpoints, restore_params
from sparse_lm.training.checkpoints.saved_checkpoint import saved_checkpoints
from sparse_lm.training.optimizer import learning_rate
from sparse_lm.training.telemetry import flops
from sparse_lm.training.telemetry.metrics import read_metrics
from sparse_lm.training.telemetry.profile import StepProfile
from sparse_lm.training.telemetry.summary import RunSummary, read_summary
from tests import small
from tests.command_lines import run
from tests.runs import command, flags, lines, small_config, start_until, trace

# A run that lasts long enough to be stopped from outside.
LONG = dict(steps=80, checkpoint_every=10, eval_every=40, keep_checkpoints=5)
LONG |= {"sparsity.start_step": 20, "sparsity.end_step": 50}


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """A long run that nobody stops."""
    workdir = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(flops.PEAKS, jax.devices()[0].device_kind, 1e12)
        assert loop.train(small_config(corpus, **LONG), str(workdir), profiled=range(25, 27))
    return workdir


@pytest.mark.long
def test_run_leaves_what_it_should(whole, corpus):
    files = {"config.json", "data.json", "metrics.jsonl", "summary.json", "tokenizer.json"}
    assert files | {"checkpoints", "profile", "tensorboard"} <= set(os.listdir(whole))
    [profile] = (whole / "profile").rglob("*.xplane.pb")
    threads = [thread for plane in jax.profiler.ProfileData.from_file(str(profile)).planes for thread in plane.lines]
    traced = [event for thread in threads for event in thread.events if event.name == "train"]
    assert [dict(event.stats)["step_num"] for event in traced] == [25, 26]
    logged = lines(whole)
    assert [line["step"] for line in logged] == list(range(80))
    assert [line["phase"] for line in logged] == ["dense"] * 20 + ["sparse"] * 30 + ["dense"] * 30
    required = {
        "step", "phase", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "step_time", "mfu",
        "executed_utilisation", "activation_sparsity", "kept_energy", "skipped",
    }  # fmt: skip
    assert all(required <= line.keys() for line in logged)
    assert all(len(line["expert_load"]) == 2 for line in logged if line["phase"] == "sparse")
    assert [line["step"] for line in logged if "eval_loss" in line] == [39, 79]
    assert logged[-1]["tokens"] == 80 * 4 * 32
    summary = read_summary(whole)
    assert (summary["state"], summary["step"], summary["tokens"]) == ("finished", 80, 80 * 4 * 32)
    assert (summary["loss"], summary["evaluation"]["loss"]) == (logged[-1]["loss"], logged[-1]["eval_loss"])
    spent = {"setup", "dense", "sparse", "compile", "evaluation", "checkpoint", "profile"}
    assert spent == {kind for kind, seconds in summary["seconds"].items() if seconds > 0}
    assert sum(summary["seconds"].values()) == pytest.approx(summary["wall_time"])
    assert summary["wall_time"] > logged[-1]["wall_time"] > logged[0]["wall_time"]


def test_utilisation_of_each_step_is_of_its_phase(whole, corpus):
    config = small_config(corpus, **LONG)
    share = flops.executed_flops_per_token(config, config.sparsity.recipe) / flops.dense_flops_per_token(config)
    assert share < 0.95
    timed = [line for line in lines(whole) if line["mfu"]]
    executed = {line["phase"]: 2 * line["executed_utilisation"] / line["mfu"] for line in timed}
    assert executed == {"dense": pytest.approx(1), "sparse": pytest.approx(share)}


@pytest.mark.long
def test_evaluate_and_generate_from_the_workdir_alone(whole):
    for name, step, sparse in (("latest", 80, False), (40, 40, True)):  # each as its step was computed
        evaluated = evaluate(whole, name, sparse)
        assert (evaluated.keys(), evaluated["step"]) == ({"step", "loss", "perplexity", "bits_per_byte"}, step)
        assert evaluated["loss"] == pytest.approx(lines(whole)[step - 1]["eval_loss"], rel=1e-6)
    losses = {step: saved.eval_loss for step, saved in saved_checkpoints(whole).items() if saved.eval_loss < math.inf}
    assert losses == {80: lines(whole)[79]["eval_loss"]}  # none for step 40, in the sparse phase
    assert restore_params(whole, "best")[2] == 80
    assert continue_texts(whole, ["def"], max_new_tokens=8, temperature=0.0)[0].startswith("def")


def test_steps_to_profile_that_are_over_are_named(tmp_path, caplog):
    for start in (2, 3):
        assert not caplog.messages
        StepProfile(tmp_path, range(2, 4), start)
    assert "--profile_steps=2,4: the run goes on from step 3" in caplog.messages


def test_finished_run_says_so_and_can_be_reported(whole, corpus, tmp_path, capsys):
    before = trace(whole), (whole / "summary.json").read_text()
    assert loop.train(small_config(corpus, **LONG), str(whole))
    assert "finished, 80 steps" in capsys.readouterr().out
    assert (trace(whole), (whole / "summary.json").read_text()) == before
    text = report([str(whole)], str(tmp_path / "report.html")).read_text()
    last = lines(whole)[-1]
    for shown in ("finished", f"{last['loss']:.5g}", f"{last['eval_loss']:.5g}", "zeros among", "seconds.compile"):
        assert shown in text


def test_training_evaluates_as_many_windows_as_it_is_told(corpus, tmp_path, monkeypatch):
    """And logs what it finds, also of steps that are not to be logged; no step is the longer for it, or for a flip."""
    config = small_config(corpus, "sste", log_every=3, eval_every=5, checkpoint_every=6, **{"data.eval_windows": 1})
    assert len(open_data(config).heldout) > 1
    read, flips = [], []

    def recorded(*args, **options):
        return (read.append(len(windows)) or windows for windows in heldout_batches(*args, **options))

    monkeypatch.setattr(loop, "heldout_batches", recorded)
    monkeypatch.setattr(Progress, "note", lambda _, step, text: flips.extend(["sparse"] * text.endswith("phase")))
    monkeypatch.setattr(loop, "RunSummary", functools.partial(RunSummary, clock=lambda: 100.0 * len(read + flips)))
    assert loop.train(config, str(tmp_path))
    assert (read, len(flips)) == ([1, 1, 1], 2)
    logged = [(line["step"], "eval_loss" in line, line["step_time"]) for line in lines(tmp_path)]
    assert logged == [(0, False, None), (3, False, 0), (4, True, None), (6, False, 0), (9, True, 0), (11, True, 0)]


def test_the_seed_decides_the_order_of_the_data(corpus):
    data, runs = open_data(small_config(corpus)), [small_config(corpus, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (np.array(next(run_data.device_batches(data, run, None, 0))) for run in runs)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.long
def test_run_that_ends_sparse_ends_with_the_weights_it_used(corpus, tmp_path, monkeypatch):
    """The last evaluation is dense, and close to the loss of the sparse steps. Bad ones before the last hinder none."""

    def damaged(*run):  # in steps 9 and 10 of 12
        return (tokens + 999 * (n in (9, 10)) for n, tokens in enumerate(run_data.device_batches(*run), run[-1]))

    monkeypatch.setattr(loop, "device_batches", damaged)
    config = small_config(corpus, "sste", **{"sparsity.end_step": 12, "optimizer.max_skipped_steps": 2})
    with pytest.raises(loop.TooManyBadSteps, match="2 steps in a row, up to step 11"):
        loop.train(config, str(tmp_path))
    assert loop.train(config, str(tmp_path))
    groups = np.asarray(restore_params(tmp_path)[0]["layers"]["ffn"]["up"]).reshape(-1, 4)
    assert ((groups != 0).sum(1) <= 2).all()
    last = lines(tmp_path)[-1]
    assert last["eval_loss"] == pytest.approx(last["loss"], abs=0.3)
    assert last["eval_loss"] == pytest.approx(evaluate(tmp_path)["loss"], rel=1e-6)


def test_too_many_bad_steps_stop_the_run(corpus, tmp_path, monkeypatch):
    config = small_config(corpus, "dense", **{"optimizer.max_skipped_steps": 3, "checkpoint_every": 12})
    (trainer, _), start = small.compiled(config), loop.restore_or_start

    def start_with_an_infinite_weight(*arguments):
        state = start(*arguments)
        return dataclasses.replace(state, params=state.params | {"norm": state.params["norm"].at[0].set(np.inf)})

    monkeypatch.setattr(loop, "restore_or_start", start_with_an_infinite_weight)
    with pytest.raises(loop.TooManyBadSteps, match="3 steps in a row, up to step 3"):
        loop.train(config, str(tmp_path))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        state = checkpoints.restore_latest(jax.eval_shape(trainer.init))
    assert int(state.skipped) >= 3
    first = trainer.init()  # nothing was learnt from bad steps
    jax.tree.map(np.testing.assert_array_equal, state.params["layers"], first.params["layers"])
    summary = read_summary(tmp_path)
    assert (summary["state"], summary["loss"]) == ("failed: TooManyBadSteps", None)
    lines = list(read_metrics(tmp_path))  # of every step that the state has counted, all at the first one's rate
    assert [line["step"] for line in lines] == list(range(int(state.step)))
    assert lines[-1]["skipped"] == summary["skipped"] == int(state.skipped)
    assert {line["learning_rate"] for line in lines} == {float(learning_rate(config)(0))}

    config = small_config(corpus, "dense", **{"optimizer.max_skipped_steps": 12})  # as many as there are
    for message in ("12 steps in a row, up to step 12", "at its end, and the last 12 of its 12 steps were bad"):
        with pytest.raises(loop.TooManyBadSteps, match=message):
            loop.train(config, str(tmp_path / "to_the_end"))


def test_other_data_is_refused(corpus, tmp_path, monkeypatch, caplog):
    """A tokenizer that is named is read while it is there, and afterwards the run's own. Only a run resumes."""
    config = small_config(corpus, "dense", **{"data.tokenizer": str(named := tmp_path / "named.json")})
    named.write_bytes((corpus / "tokenizer.json").read_bytes())
    run_data.open_data_together(tmp_path, config)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    named.write_text("{}")
    with pytest.raises(ConfigError, match=r"data\.tokenizer = .*named\.json is not a tokenizer"):
        loop.train(config, str(tmp_path))
    named.unlink()
    config = dataclasses.replace(config, log_every=config.log_every + 1)

    def open_other(fingerprint, config):
        data = open_data(config)
        return dataclasses.replace(data, info=data.info | {fingerprint: "0" * 64})

    for fingerprint, difference in (("tokenizer_sha256", "another tokenizer"), ("corpus_sha256", "other text")):
        message = rf"data\.path = .* has {difference} .*than the run in {tmp_path};"
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=message):
            patch.setattr(run_data, "open_data", functools.partial(open_other, fingerprint))
            loop.train(config, str(tmp_path))
    assert "resuming" not in caplog.text
    loop.train(config, str(tmp_path))
    assert f"resuming with config.log_every = {config.log_every} (was " in caplog.text


def test_missing_backend_is_refused_before_anything_compiles(corpus, tmp_path):
    with pytest.raises(ConfigError, match=r"sparsity\.implementation = 'hopper'"):
        loop.train(small_config(corpus, **{"sparsity.implementation": "hopper"}), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# As a user runs it: processes.


@pytest.mark.long
def test_killed_run_goes_on_as_if_it_had_not_been_and_sigterm_saves_and_exits_cleanly(corpus, whole, tmp_path, capsys):
    """SIGKILL just behind the flip, and SIGTERM as it goes on. `experiments/results/kills_cpu.json`: at 50 moments."""
    workdir = tmp_path / "killed"
    process = start_until(command(corpus, workdir, *flags(LONG)), workdir, 25)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    process = start_until(command(corpus, workdir, *flags(LONG)), workdir, 45)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    saved = max(int(name) for name in os.listdir(workdir / "checkpoints") if name.isdecimal())
    assert saved > 45
    assert "SIGTERM: finishing the step under way, saving; again to stop now" in output
    assert f"step {saved}: stopped by SIGTERM, saved" in output
    summary = read_summary(workdir)
    assert (summary["state"], summary["step"]) == ("stopped by SIGTERM", saved)
    assert loop.train(small_config(corpus, **LONG), str(workdir))
    output += capsys.readouterr().out
    for shown in ("going on", "and the sparse step, the phase transitions and evaluation", "step 80: held-out loss"):
        assert shown in output
    assert trace(workdir) == trace(whole)
    summary = read_summary(workdir)
    assert (summary["state"], summary["step"], len(summary["processes"])) == ("finished", 80, 3)


@pytest.mark.long
def test_sigint_while_data_is_prepared_is_one_line(corpus, tmp_path):
    code = (
        "import runpy, signal; from sparse_lm.training import run_data;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # a shell's background jobs ignore it
        "run_data.open_data = lambda config: signal.raise_signal(signal.SIGINT);"
        "runpy.run_module('sparse_lm.train', run_name='__main__', alter_sys=True)"
    )
    _, _, _, *arguments = command(corpus, tmp_path / "run")
    result = run([sys.executable, "-c", code, *arguments])
    assert (result.returncode, result.stderr.splitlines()[-1]) == (1, "interrupted before training began")
    assert "Traceback" not in result.stderr
