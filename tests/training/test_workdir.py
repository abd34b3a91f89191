import dataclasses
import fcntl
import os
import socket

import pytest

from sparse_lm.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, SparsityConfig
from sparse_lm.errors import ConfigError, WorkdirError
from sparse_lm.recipes import Fst, SSte
from sparse_lm.training.workdir import check_same_config, load_config, save_config, workdir_lock

CONFIG = Config(
    seed=3,
    steps=500,
    model=ModelConfig(dim=64, dtype="float32"),
    sparsity=SparsityConfig(recipe=Fst(), start_step=10, end_step=20),
)


def begin_run(workdir, config):
    """The workdir of a run that has logged a step."""
    save_config(workdir, config)
    (workdir / "metrics.jsonl").write_text('{"step": 0}\n')


def test_a_directory_without_a_run_or_a_step_may_be_of_any_config(tmp_path):
    with pytest.raises(WorkdirError, match=rf"^--workdir={tmp_path}: has no config\.json, as every run has$"):
        load_config(tmp_path)
    check_same_config(tmp_path, CONFIG)
    save_config(tmp_path, CONFIG)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    check_same_config(tmp_path, dataclasses.replace(CONFIG, batch_size=8))


@pytest.mark.parametrize("content", [b"", b"\xff{}", b"[1]"])
def test_damaged_config_is_named(tmp_path, content):
    begin_run(tmp_path, CONFIG)
    (tmp_path / "config.json").write_bytes(content)
    for read in (load_config, lambda workdir: check_same_config(workdir, CONFIG)):
        with pytest.raises(WorkdirError, match=rf"^--workdir={tmp_path}: config\.json (cannot be read|must be)[^\n]+$"):
            read(tmp_path)


def test_a_begun_run_does_not_go_on_without_its_config(tmp_path):
    begin_run(tmp_path, CONFIG)
    (tmp_path / "config.json").unlink()
    with pytest.raises(WorkdirError, match=r": has no config\.json, as every run has$"):
        check_same_config(tmp_path, CONFIG)


@pytest.mark.parametrize(
    "key, there, change",
    [
        ("seed", "3", {"seed": 4}),
        ("model.dim", "64", {"model": ModelConfig(dim=128, dtype="float32")}),
        ("sparsity.recipe", "'fst'", {"sparsity": dataclasses.replace(CONFIG.sparsity, recipe=SSte())}),
        ("mesh.tensor", "1", {"mesh": MeshConfig(tensor=2)}),  # for so many devices neurons are sorted
    ],
)
def test_another_config_is_refused_with_key_and_both_values(tmp_path, key, there, change):
    save_config(tmp_path, CONFIG)
    (tmp_path / "checkpoints" / "100").mkdir(parents=True)
    with pytest.raises(ConfigError) as error:
        check_same_config(tmp_path, dataclasses.replace(CONFIG, **change))
    message = str(error.value)
    assert message.startswith(f"config.{key} = ") and f"has {there};" in message
    assert str(tmp_path) in message and "\n" not in message


def test_harmless_changes_are_allowed_and_told_but_a_run_is_not_made_shorter(tmp_path):
    begin_run(tmp_path, CONFIG)
    model = dataclasses.replace(CONFIG.model, remat="full", unroll_layers=True)
    data, optimizer = DataConfig(cache_dir="elsewhere"), OptimizerConfig(max_skipped_steps=3)
    changed = dataclasses.replace(CONFIG, steps=800, model=model, data=data, optimizer=optimizer)
    changes = check_same_config(tmp_path, changed)
    told = {change.partition(" = ")[0].removeprefix("resuming with config.") for change in changes}
    assert told == {"steps", "model.remat", "model.unroll_layers", "data.cache_dir", "optimizer.max_skipped_steps"}
    message = rf"^config\.steps = 499: the run in {tmp_path} is of 500 steps and cannot be made shorter;"
    with pytest.raises(ConfigError, match=message):
        check_same_config(tmp_path, dataclasses.replace(CONFIG, steps=499))
    assert load_config(tmp_path).steps == 500


def test_a_run_that_stays_sparse_is_made_longer_with_its_phase(tmp_path):
    def staying(steps, leave=False):
        sparsity = dataclasses.replace(CONFIG.sparsity, end_step=steps, leave=leave)
        return dataclasses.replace(CONFIG, steps=steps, sparsity=sparsity)

    begin_run(tmp_path, staying(500))
    check_same_config(tmp_path, staying(800))
    for refused in (staying(400), staying(800, leave=True)):
        with pytest.raises(ConfigError):
            check_same_config(tmp_path, refused)


def test_a_second_run_is_refused_and_the_lock_of_one_that_has_ended_is_taken_over(tmp_path):
    """A run that was killed ends so, too: its lock goes with its open file, and what it wrote there stays."""
    holder = rf"process {os.getpid()} on {socket.gethostname()} \(since 20\S+\)"
    for _ in range(2):
        with workdir_lock(tmp_path):
            refused = pytest.raises(WorkdirError, match=rf"^--workdir={tmp_path}: {holder} trains in it")
            with refused, workdir_lock(tmp_path):
                pytest.fail("two runs hold the lock")


def test_workdir_under_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for workdir in (tmp_path / "file", tmp_path / "file" / "run"):
        refused = pytest.raises(WorkdirError, match=rf"^--workdir={workdir}: cannot be written: [^\n]+$")
        with refused, workdir_lock(workdir):
            pytest.fail("a file is no workdir")


def test_file_system_without_locks_is_warned_about(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with workdir_lock(tmp_path):
        assert "cannot be locked" in caplog.text
