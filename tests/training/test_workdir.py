import dataclasses
import json
import logging

import pytest

from sparse_lm.config import Config, ConfigError, DataConfig, ModelConfig, OptimizerConfig, SparsityConfig
from sparse_lm.recipes import Dense, Fst, Slices, SSte
from sparse_lm.training.workdir import WorkdirError, check_same_config, load_config, make_workdir, save_config

CONFIG = Config(
    seed=3,
    steps=500,
    model=ModelConfig(dim=64, dtype="float32"),
    sparsity=SparsityConfig(recipe=Fst(), start_step=10, end_step=20),
)


def begin_run(workdir, config, begun="metrics.jsonl"):
    """The workdir of a run that has logged a step, or saved one."""
    save_config(workdir, config)
    if begun == "metrics.jsonl":
        (workdir / begun).write_text('{"step": 0}\n')
    else:
        (workdir / begun).mkdir(parents=True)


@pytest.mark.parametrize("recipe", [Fst(mask_decay=2e-5), Slices(m=8, implementation="reference"), Dense()])
def test_config_round_trip(tmp_path, recipe):
    config = dataclasses.replace(CONFIG, sparsity=dataclasses.replace(CONFIG.sparsity, recipe=recipe))
    save_config(tmp_path, config)
    assert load_config(tmp_path) == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_directory_without_a_run(tmp_path):
    with pytest.raises(WorkdirError, match=rf"^--workdir={tmp_path}: holds no run"):
        load_config(tmp_path)
    check_same_config(tmp_path, CONFIG)


@pytest.mark.parametrize("content", [b"", b'{"seed": 3, "ste', b"\0\0\0\0", b"\xff{}", b"[1]"])
def test_damaged_config_is_named(tmp_path, content):
    begin_run(tmp_path, CONFIG)
    (tmp_path / "config.json").write_bytes(content)
    for read in (load_config, lambda workdir: check_same_config(workdir, CONFIG)):
        with pytest.raises(WorkdirError, match=rf"^--workdir={tmp_path}: config\.json (cannot be read|must be)[^\n]+$"):
            read(tmp_path)


def test_a_run_of_before_the_recipes_is_refused_with_the_commit_that_reads_it(tmp_path):
    begin_run(tmp_path, CONFIG)
    values = json.loads((tmp_path / "config.json").read_text())
    values["sparsity"]["selection"] = "slices"
    (tmp_path / "config.json").write_text(json.dumps(values))
    for read in (load_config, lambda workdir: check_same_config(workdir, CONFIG)):
        with pytest.raises(
            WorkdirError, match=r"config\.json has sparsity\.selection: commit 6e6d42e, .* can read it$"
        ):
            read(tmp_path)


def test_same_config_resumes(tmp_path):
    begin_run(tmp_path, CONFIG)
    check_same_config(tmp_path, CONFIG)


def test_run_that_ended_before_its_first_step_may_have_had_any_config(tmp_path):
    save_config(tmp_path, CONFIG)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    check_same_config(tmp_path, dataclasses.replace(CONFIG, batch_size=8))


@pytest.mark.parametrize(
    "key, there, change",
    [
        ("seed", "3", {"seed": 4}),
        ("batch_size", "16", {"batch_size": 8}),
        ("model.dim", "64", {"model": ModelConfig(dim=128, dtype="float32")}),
        ("optimizer.learning_rate", "0.003", {"optimizer": OptimizerConfig(learning_rate=1e-3)}),
        ("sparsity.recipe", "'fst'", {"sparsity": dataclasses.replace(CONFIG.sparsity, recipe=SSte())}),
    ],
)
@pytest.mark.parametrize("begun", ["metrics.jsonl", "checkpoints/100"])
def test_another_config_is_refused_with_key_and_both_values(tmp_path, key, there, change, begun):
    begin_run(tmp_path, CONFIG, begun)
    with pytest.raises(ConfigError) as error:
        check_same_config(tmp_path, dataclasses.replace(CONFIG, **change))
    message = str(error.value)
    assert message.startswith(f"config.{key} = ") and f"has {there};" in message
    assert str(tmp_path) in message and "\n" not in message


@pytest.mark.parametrize(
    "key, change",
    [
        ("steps", {"steps": 800}),
        ("keep_checkpoints", {"keep_checkpoints": 5}),
        ("data.cache_dir", {"data": DataConfig(cache_dir="elsewhere")}),
        ("model.remat", {"model": ModelConfig(dim=64, dtype="float32", remat="full")}),
    ],
)
def test_harmless_changes_are_allowed_and_logged(tmp_path, key, change, caplog):
    begin_run(tmp_path, CONFIG)
    with caplog.at_level(logging.WARNING):
        check_same_config(tmp_path, dataclasses.replace(CONFIG, **change))
    assert f"config.{key} = " in caplog.text


def test_a_run_is_not_made_shorter(tmp_path):
    begin_run(tmp_path, CONFIG)
    message = rf"^config\.steps = 499: the run in {tmp_path} is of 500 steps and cannot be made shorter;"
    with pytest.raises(ConfigError, match=message):
        check_same_config(tmp_path, dataclasses.replace(CONFIG, steps=499))
    assert load_config(tmp_path).steps == 500


def test_a_run_that_is_made_longer_says_what_happens_to_the_learning_rate(tmp_path, caplog):
    """The longer run falls on a line from 0.01 after 300 steps to 0.001 after 700: half of that after 500."""
    optimizer = OptimizerConfig(learning_rate=0.01, schedule="wsd", decay_steps=400)
    config = dataclasses.replace(CONFIG, optimizer=optimizer)
    begin_run(tmp_path, config)
    check_same_config(tmp_path, dataclasses.replace(config, steps=700))
    assert "at step 499 it is at 0.0055 now, where the schedule of 500 steps ends at 0.001" in caplog.text
    caplog.clear()
    check_same_config(tmp_path, config)
    assert not caplog.text


def test_refused_config_is_not_said_to_be_resumed_with(tmp_path, caplog):
    begin_run(tmp_path, CONFIG)
    with pytest.raises(ConfigError):
        check_same_config(tmp_path, dataclasses.replace(CONFIG, steps=800, model=ModelConfig(dim=128)))
    assert not caplog.text


def test_workdir_is_made(tmp_path):
    made = make_workdir(tmp_path / "runs" / "tiny")
    assert made.is_dir() and not list(made.iterdir())
    assert make_workdir(made) == made


@pytest.mark.parametrize("workdir", ["gs://bucket/run", "s3://bucket", "file:///run"])
@pytest.mark.parametrize("use", [make_workdir, load_config])
def test_url_is_refused_by_name(workdir, use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkdirError, match=rf"^--workdir={workdir}: must be a path, not a URL"):
        use(workdir)
    assert not list(tmp_path.iterdir())


def test_workdir_under_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for workdir in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(WorkdirError, match=rf"^--workdir={workdir}: cannot be written: [^\n]+$"):
            make_workdir(workdir)


def test_config_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(WorkdirError, match=rf"^--workdir={tmp_path}: cannot be written: Is a directory$"):
        save_config(tmp_path, CONFIG)


def test_unwritable_workdir_is_refused(tmp_path, monkeypatch):
    """Permissions do not bind a superuser, so the system's answer is played."""

    def denied(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", denied)
    with pytest.raises(WorkdirError, match=r"cannot be written: Permission denied$"):
        make_workdir(tmp_path)
