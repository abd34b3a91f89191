"""Disturbs a run from outside, in one process: crashes, signals and a full disk, at the worst moments."""

import contextlib
import dataclasses
import os
import resource
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from sparse_lm.data import DataError
from sparse_lm.training import evaluation, loop, run_data
from sparse_lm.training.checkpoints.checkpoint import Checkpoints
from sparse_lm.training.checkpoints.restored import restore_for_sparse
from sparse_lm.training.telemetry.summary import read_summary
from sparse_lm.training.workdir import WorkdirError, meaning
from tests.data.examples import damage_records
from tests.runs import Crash, crash_before, lines, small_config, trace
from tests.training.checkpoints.test_checkpoint import steps_on_disk
from tests.unfinished_io import leaves_io_unfinished


@pytest.fixture(scope="module")
def config(corpus):
    """12 steps, sparse on 4..8, masks chosen anew at 6, evaluated after 6 and 12, saved after 3, 6, 9 and 12."""
    return small_config(corpus, "fst")


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


def compiled_ahead(program):
    """`program`, but an error if it is called before it was compiled, as then no signal could interrupt that."""
    compiled = []

    def call(*args):
        assert compiled
        return program(*args)

    def lower(*args):
        compiled.append(program)
        return program.lower(*args)

    call.lower = lower
    return call


@pytest.mark.long
def test_a_run_that_crashed_in_any_phase_goes_on_as_if_it_had_not(config, whole, tmp_path, monkeypatch):
    """Also just behind both flips; checkpoints are 3 steps apart."""
    make = loop.make_transitions

    def edges_compiled_ahead(*args):
        edges = make(*args)
        enter, refresh = compiled_ahead(edges.enter_sparse), compiled_ahead(edges.refresh)
        return dataclasses.replace(edges, enter_sparse=enter, refresh=refresh)

    monkeypatch.setattr(loop, "make_transitions", edges_compiled_ahead)
    for step in (2, 5, 7, 10):
        with monkeypatch.context() as patch, pytest.raises(Crash):
            crash_before(patch, step)
            loop.train(config, str(tmp_path))
    assert loop.train(config, str(tmp_path))
    assert_same_end(tmp_path, whole, config)
    assert [line["step"] for line in lines(whole) if "flip_rate" in line] == [6]


@pytest.mark.long
def test_a_mixture_within_documents_of_several_corpora_goes_on_with_its_shares(corpus, tmp_path, monkeypatch):
    other = shutil.copytree(corpus, tmp_path / "other")
    changes = {"data.path": f"{corpus}:0.7,{other}:0.3", "model.document_separator": 0}
    config = small_config(corpus, "experts24", **changes)
    assert loop.train(config, str(tmp_path / "whole"))
    with monkeypatch.context() as patch, pytest.raises(Crash):
        crash_before(patch, 7)
        loop.train(config, str(tmp_path / "stopped"))
    assert loop.train(config, str(tmp_path / "stopped"))
    assert_same_end(tmp_path / "stopped", tmp_path / "whole", config)
    for line in lines(tmp_path / "stopped"):
        shares, windows = line["data_shares"], 4 * (line["step"] + 1)
        assert shares == pytest.approx({str(corpus): 0.7, str(other): 0.3}, abs=1 / windows)
        assert round(shares[str(corpus)] * windows, 6).is_integer()


def terminate_once(function, *, before: bool):
    """`function`, with a SIGTERM just before or just after its first call."""
    signals = iter([signal.SIGTERM])

    def call(*args, **kwargs):
        if before:
            for number in signals:
                os.kill(os.getpid(), number)
        result = function(*args, **kwargs)
        for number in signals:
            os.kill(os.getpid(), number)
        return result

    return call


class CompilesForever:
    """A program whose compilation is interrupted, and goes on."""

    def __init__(self, program):
        self._program = program

    def __call__(self, *args):
        return self._program(*args)

    def lower(self, *_):
        return self

    def compile(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)


def in_compilation(patch, config):
    trainer = loop.make_trainer(config)
    interrupted = dataclasses.replace(trainer, sparse_step=CompilesForever(trainer.sparse_step))
    patch.setattr(loop, "make_trainer", lambda _: interrupted)


def in_compilation_of_the_entry(patch, config):
    make = loop.make_transitions

    def interrupted(*args):
        transitions = make(*args)
        return dataclasses.replace(transitions, enter_sparse=CompilesForever(transitions.enter_sparse))

    patch.setattr(loop, "make_transitions", interrupted)


def in_evaluation(patch, config):
    original = evaluation.make_evaluation
    patch.setattr(evaluation, "make_evaluation", lambda *args: terminate_once(original(*args), before=True))


def in_a_save(patch, config):
    patch.setattr(Checkpoints, "save", terminate_once(Checkpoints.save, before=False))


def in_restoring(patch, config):
    patch.setattr(Checkpoints, "restore_latest", terminate_once(Checkpoints.restore_latest, before=False))


@pytest.mark.parametrize(
    "moment, saved",
    [
        (in_compilation, [3, 4]),
        (in_compilation_of_the_entry, [3, 4]),
        (in_evaluation, [3, 6]),
        (in_a_save, [3]),
        (in_restoring, []),
    ],
)
def test_sigterm_is_obeyed(moment, saved, config, whole, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        moment(patch, config)
        assert not loop.train(config, str(tmp_path))
    assert steps_on_disk(tmp_path) == saved
    stopped = f"stopped by SIGTERM after step {max(saved, default=0)}{', saved' if saved else ''};"
    assert stopped in capsys.readouterr().out
    assert loop.train(config, str(tmp_path))
    assert_same_end(tmp_path, whole, config)


@contextlib.contextmanager
def disk_full(monkeypatch, first, end):
    """From the batch of step `first` to that of step `end` on, no file grows over 2 KiB."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    original, save = run_data.train_batches, Checkpoints.save

    def batches(*args, start_step, **kwargs):
        for step, windows in enumerate(original(*args, start_step=start_step, **kwargs), start_step):
            if step in (first, end):
                resource.setrlimit(resource.RLIMIT_FSIZE, (2048, unlimited[1]) if step == first else unlimited)
            yield windows

    def save_before_it_is_full(self, step, *args):
        save(self, step, *args)
        if step <= first:
            self.wait()

    with monkeypatch.context() as patch:
        patch.setattr(run_data, "train_batches", batches)
        patch.setattr(Checkpoints, "save", save_before_it_is_full)
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


@leaves_io_unfinished
def test_training_goes_on_over_a_full_disk(config, whole, tmp_path, monkeypatch, caplog):
    with disk_full(monkeypatch, first=4, end=10):
        assert loop.train(config, str(tmp_path))
    assert (
        f"checkpoint 6 could not be saved in {tmp_path}/checkpoints, and the newest is 3: File too large" in caplog.text
    )
    assert "metrics.jsonl cannot be written" in caplog.text
    assert steps_on_disk(tmp_path)[-1] == 12
    assert not list((tmp_path / "checkpoints").glob("*tmp*"))
    assert_same_end(tmp_path, whole, config)


@pytest.mark.long
@leaves_io_unfinished
def test_a_run_whose_end_is_not_saved_says_so_and_goes_on_from_what_is(config, whole, tmp_path, monkeypatch):
    message = "checkpoint 12 could not be saved in .*, and the newest is 3: File too large"
    with disk_full(monkeypatch, first=4, end=12), pytest.raises(WorkdirError, match=message):
        loop.train(config, str(tmp_path))
    assert steps_on_disk(tmp_path) == [3]
    assert loop.train(config, str(tmp_path))
    assert_same_end(tmp_path, whole, config)


@leaves_io_unfinished
def test_a_damaged_newest_checkpoint_costs_the_steps_since_the_one_before(config, whole, tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        in_evaluation(patch, config)
        assert not loop.train(config, str(tmp_path))
    for file in (tmp_path / "checkpoints" / "6" / "params" / "ocdbt.process_0" / "d").iterdir():
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    assert loop.train(config, str(tmp_path))
    assert "checkpoint 6 is damaged" in caplog.text
    assert "using checkpoint 3 instead of 6" in caplog.text
    assert_same_end(tmp_path, whole, config)


def test_a_checkpoint_of_values_that_no_run_has_saved_is_damaged(corpus, tmp_path):
    config = small_config(corpus, "sste")
    state = loop.make_trainer(config).init()
    sound = jax.tree.map(np.ones_like, jax.device_get(state.recipe_state))
    broken = sound._replace(scale_up=np.float32([1, np.nan]))
    with Checkpoints(tmp_path, keep=2, run=meaning(config)) as checkpoints:
        checkpoints.save(6, dataclasses.replace(state, step=state.step + 6, recipe_state=broken))
    with pytest.raises(WorkdirError, match="all of its checkpoints are damaged: 6"):
        loop.train(config, str(tmp_path))


def test_damaged_data_end_a_run_that_goes_on_once_they_are_repaired(config, whole, tmp_path, monkeypatch, corpus):
    shard = next(corpus.glob("*train*"))
    sound, save = shard.read_bytes(), Checkpoints.save

    def save_before_damage(self, step, *args):
        save(self, step, *args)
        if step == 6:
            damage_records(shard, 60_000)

    try:
        with monkeypatch.context() as patch, pytest.raises(DataError, match=f"^{shard} is damaged: "):
            patch.setattr(Checkpoints, "save", save_before_damage)
            loop.train(config, str(tmp_path))
    finally:
        shard.write_bytes(sound)
    assert read_summary(tmp_path)["state"] == "failed: DataError"
    assert steps_on_disk(tmp_path) == [3, 6]
    assert loop.train(config, str(tmp_path))
    assert_same_end(tmp_path, whole, config)


def test_a_checkpoint_of_another_recipe_in_a_new_workdir_is_refused(config, whole, tmp_path, corpus):
    """Copied without config.json, which would tell."""
    (tmp_path / "checkpoints").symlink_to(whole / "checkpoints")
    message = "is of another run: config.sparsity.recipe is 'fst' in the checkpoint and 'slices' here"
    with pytest.raises(WorkdirError, match=message):
        loop.train(small_config(corpus), str(tmp_path))


@pytest.mark.long
def test_tokens_that_are_not_finite_where_experts_are_chosen_cost_their_steps_alone(corpus, tmp_path, monkeypatch):
    """One in the batch that enters the sparse phase, one in that of a refresh."""
    batches, make_trainer = run_data.train_batches, loop.make_trainer
    config, no_text = small_config(corpus), 319  # the corpus has 300 tokens
    assert (config.sparsity.start_step, config.sparsity.refresh_every) == (4, 2)

    def spoiled(*args, start_step, **kwargs):
        for step, windows in enumerate(batches(*args, start_step=start_step, **kwargs), start_step):
            if step in (4, 6):
                windows = np.array(windows)
                windows[1, 5] = no_text
            yield windows

    def with_an_infinite_token(config):
        def init():
            state = trainer.init()
            rows = state.params["embed"]["embedding"].at[no_text].set(np.inf)
            return dataclasses.replace(state, params=state.params | {"embed": {"embedding": rows}})

        trainer = make_trainer(config)
        return dataclasses.replace(trainer, init=init)

    monkeypatch.setattr(run_data, "train_batches", spoiled)
    monkeypatch.setattr(loop, "make_trainer", with_an_infinite_token)
    assert loop.train(config, str(tmp_path))
    written = lines(tmp_path)
    assert [line["step"] for line in written if line["loss"] is None] == [4, 6]
    assert [line["skipped"] for line in written] == [0] * 4 + [1] * 2 + [2] * 6
    assert all(np.isfinite(line["eval_loss"]) for line in written if "eval_loss" in line)
    _, state, _ = restore_for_sparse(tmp_path, config, "latest")
    assert all(np.isfinite(array).all() for array in jax.device_get(state))
