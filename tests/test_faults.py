"""Disturbs a run from outside, in one process, at the worst moments, or not at all: crashes, signals, a full disk."""

import dataclasses
import os
import re
import shutil
import signal
import sys

import jax
import numpy as np
import pytest

from sparse_lm.errors import DataError, WorkdirError
from sparse_lm.evaluate import evaluate
from sparse_lm.training import loop
from sparse_lm.training.checkpoints.checkpoint import Checkpoints
from sparse_lm.training.checkpoints.restored import restore_for_dense
from sparse_lm.training.evaluation import Evaluation
from sparse_lm.training.telemetry.summary import read_summary
from sparse_lm.training.workdir import save_config
from tests.command_lines import run
from tests.data.examples import damage_records
from tests.runs import command, lines, small_config, trace, train_and_crash
from tests.training.checkpoints.test_checkpoint import steps_on_disk

DEMANDING = {
    **{"model.activation": "gated_relu2", "model.qk_norm": True, "model.precision": "fp8"},
    **{"optimizer.name": "muon", "optimizer.moments": "bfloat16"},
}


@pytest.fixture(scope="module")
def config(corpus):
    """12 steps, sparse on 4..8, masks chosen anew at 6, evaluated after 6 and 12, saved after 3, 6, 9 and 12."""
    return small_config(corpus, "fst", **DEMANDING)


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """A run that nothing happens to."""
    workdir = tmp_path_factory.mktemp("whole")
    assert loop.train(config, str(workdir))
    return workdir


def assert_same_end(workdir, whole, config):
    assert trace(workdir) == trace(whole)
    states = []
    for path in (workdir, whole):
        with Checkpoints(path, keep=2) as checkpoints:
            states.append(jax.device_get(checkpoints.restore_latest(loop.make_trainer(config).abstract_state())))
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.long
def test_a_run_that_crashed_in_any_phase_goes_on_as_if_it_had_not(config, whole, tmp_path):
    """Also just behind both flips; checkpoints are 3 steps apart."""
    for step in (2, 5, 7, 10):
        train_and_crash(config, tmp_path, before=step)
    assert loop.train(config, str(tmp_path))
    assert_same_end(tmp_path, whole, config)
    logged = lines(whole)
    assert [line["step"] for line in logged if "flip_rate" in line] == [6]
    assert logged[-1]["loss"] < logged[0]["loss"] - 1
    assert evaluate(str(tmp_path))["loss"] == pytest.approx(logged[-1]["eval_loss"], rel=1e-6)


@pytest.mark.long
def test_what_a_refresh_tells_is_logged_whatever_its_step(config, tmp_path):
    assert loop.train(dataclasses.replace(config, log_every=5), str(tmp_path))
    told = {line["step"]: "flip_rate" in line for line in lines(tmp_path)}
    assert told == {0: False, 5: False, 6: True, 10: False, 11: False}  # a refresh before step 6; evaluations


@pytest.mark.long
def test_a_mixture_of_gates_within_documents_of_two_corpora_goes_on_as_if_it_had_not_stopped(corpus, tmp_path):
    """Stopped within the sparse phase."""
    other = shutil.copytree(corpus, tmp_path / "other")
    changes = {"model.activation": "gated_relu2", "model.document_separator": 0, "model.precision": "fp8"}
    config = small_config(corpus, "experts24", **changes, **{"data.path": f"{corpus}:0.7,{other}:0.3"})
    assert loop.train(config, str(tmp_path / "whole"))
    train_and_crash(config, tmp_path / "stopped", before=7)
    assert loop.train(config, str(tmp_path / "stopped"))
    assert_same_end(tmp_path / "stopped", tmp_path / "whole", config)
    logged = lines(tmp_path / "stopped")
    assert logged[-1]["loss"] < logged[0]["loss"] - 2
    assert abs(logged[-1]["eval_loss"] - logged[-1]["loss"]) < 1
    assert evaluate(str(tmp_path / "stopped"))["loss"] == pytest.approx(logged[-1]["eval_loss"], rel=1e-6)
    sparse = evaluate(str(tmp_path / "stopped"), sparse=True)["loss"]
    assert sparse != logged[-1]["eval_loss"] == pytest.approx(sparse, rel=0.3)
    assert_experts_are_watched_and_balanced(tmp_path / "stopped", config)


def assert_experts_are_watched_and_balanced(workdir, config):
    """Biases of routers move by loads alone: one step each way in each step, whatever optimizer and decay do."""
    names = "grad_norm", "router_z_loss", "load_entropy", "largest_router_bias", "expert_load"
    norms, z_losses, entropies, largest, loads = (np.array([line[n] for line in lines(workdir)]) for n in names)
    assert np.isfinite(norms).all() and np.isfinite(z_losses).all()
    assert entropies.min() > 0.3 and entropies.max() <= 1 + 1e-6
    np.testing.assert_allclose(loads.sum(axis=-1), np.ones((config.steps, config.model.layers)), rtol=1e-5)
    missing = loads.mean(axis=-1, keepdims=True) - loads
    expected = 4e-3 / config.model.experts * np.where(np.abs(missing) > 1e-6, np.sign(missing), 0).sum(axis=0)
    params, step = restore_for_dense(str(workdir), config)
    assert step == config.steps
    np.testing.assert_allclose(params["layers"]["ffn"]["router_bias"], expected, atol=1e-7)
    assert largest[0].max() == 0 and largest[-1].max() > 0


def terminate_once(function):
    """`function`, with a SIGTERM just before its first call."""
    signals = iter([signal.SIGTERM])

    def call(*args, **kwargs):
        for number in signals:
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    return call


COMPILATION, EVALUATION, SAVE = (loop, "compile_programs"), (Evaluation, "__call__"), (Checkpoints, "save")


MOMENTS = [(COMPILATION, [1])], [(EVALUATION, [3, 6])], [(SAVE, [3]), (COMPILATION, [3, 4])]


@pytest.mark.parametrize("moments", MOMENTS)
def test_sigterm_is_obeyed(moments, config, whole, tmp_path, monkeypatch, capsys):
    """A second one, as the run goes on, too."""
    for (owner, name), saved in moments:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, terminate_once(getattr(owner, name)))
            assert not loop.train(config, str(tmp_path))
        assert f"step {saved[-1]}: stopped by SIGTERM, saved;" in capsys.readouterr().out
        assert steps_on_disk(tmp_path) == saved
    assert loop.train(config, str(tmp_path))
    assert_same_end(tmp_path, whole, config)


def test_a_start_that_trains_nothing_changes_nothing(config, whole, tmp_path, monkeypatch):
    """So that the command before it still goes on; and without checkpoints none begins anew over what was logged."""
    workdir = shutil.copytree(whole, tmp_path / "run")
    monkeypatch.setattr(loop, "print_overview", terminate_once(loop.print_overview))
    assert not loop.train(dataclasses.replace(config, steps=24), str(workdir))
    assert loop.train(config, str(workdir))
    assert_same_end(workdir, whole, config)
    shutil.rmtree(workdir / "checkpoints")
    logged = (workdir / "metrics.jsonl").read_bytes()
    with pytest.raises(WorkdirError, match="has no checkpoint, although step 11 is logged: put its checkpoints back"):
        loop.train(config, str(workdir))
    assert (workdir / "metrics.jsonl").read_bytes() == logged


NO_ROOM = """
import resource, runpy
from sparse_lm.training.checkpoints.checkpoint import Checkpoints
save = Checkpoints.save
def save_with_no_room(self, step, *args):
    if step == 6:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
    save(self, step, *args)
    self.wait()
Checkpoints.save = save_with_no_room
runpy.run_module("sparse_lm.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.long
def test_a_save_that_fails_ends_a_run_in_one_line_and_leaves_the_checkpoint_before(tmp_path, corpus):
    _, _, _, *arguments = command(corpus, tmp_path, "--quiet", recipe="dense")
    result = run([sys.executable, "-c", NO_ROOM, *arguments])
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(f"--workdir={tmp_path}: checkpoint 6 could not be saved: .*File too large.*\n", result.stderr)
    assert steps_on_disk(tmp_path) == [3]


def test_damaged_data_end_a_run_that_goes_on_once_they_are_repaired(config, whole, tmp_path, monkeypatch, corpus):
    shard = next(corpus.glob("*train*"))
    sound, save = shard.read_bytes(), Checkpoints.save

    def save_before_damage(self, step, *args):
        save(self, step, *args)
        if step == 6:
            damage_records(shard, 60_000)

    try:
        with monkeypatch.context() as patch, pytest.raises(DataError, match=f"^cannot read {shard.parent}: "):
            patch.setattr(Checkpoints, "save", save_before_damage)
            loop.train(config, str(tmp_path))
    finally:
        shard.write_bytes(sound)
    assert read_summary(tmp_path)["state"] == "failed: DataError"
    assert steps_on_disk(tmp_path) == [3, 6]
    assert loop.train(config, str(tmp_path))
    assert_same_end(tmp_path, whole, config)


def test_checkpoints_of_another_recipe_are_refused(config, whole, tmp_path, corpus):
    """They have taken the place of a run's own, and its config.json does not tell."""
    shutil.copy(whole / "data.json", tmp_path)
    save_config(tmp_path, small_config(corpus, **DEMANDING))
    (tmp_path / "checkpoints").symlink_to(whole / "checkpoints")
    message = "is of another run: config.sparsity.recipe is 'fst' in the checkpoint and 'slices' here"
    for use in (lambda path: loop.train(small_config(corpus, **DEMANDING), path), evaluate):
        with pytest.raises(WorkdirError, match=message):
            use(str(tmp_path))
