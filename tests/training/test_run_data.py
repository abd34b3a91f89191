"""A run goes on with its own text and tokenizer, which its workdir keeps."""

import json
import pathlib
import shutil
import types

import pytest

from sparse_lm.config import Config, ConfigError, DataConfig
from sparse_lm.data.tokenizer import fingerprint, train_tokenizer
from sparse_lm.training.run_data import check_same_data, check_same_tokenizer, save_data
from sparse_lm.training.workdir import WorkdirError

CONFIG = Config(data=DataConfig(path="corpus"))


def prepared(directory, words="def main return", corpus_sha256="a" * 64):
    """What is known of data with a tokenizer that was trained on some words."""
    directory.mkdir()
    tokenizer = train_tokenizer([words] * 8, vocab_size=270)
    tokenizer.save(str(directory / "tokenizer.json"))
    info = {"corpus_sha256": corpus_sha256, "tokenizer_sha256": fingerprint(tokenizer)}
    return types.SimpleNamespace(directory=directory, tokenizer_path=directory / "tokenizer.json", info=info)


@pytest.fixture
def data(tmp_path):
    return prepared(tmp_path / "first")


@pytest.fixture
def workdir(tmp_path, data):
    """Of a run that has logged a step."""
    path = tmp_path / "run"
    save_data(path, data)
    (path / "metrics.jsonl").write_text('{"step": 0}\n')
    return path


def test_data_is_kept_and_goes_on(workdir, data):
    assert (workdir / "tokenizer.json").read_bytes() == data.tokenizer_path.read_bytes()
    assert json.loads((workdir / "data.json").read_text()) == {"corpus_sha256": "a" * 64}
    check_same_data(workdir, CONFIG, data)


@pytest.mark.parametrize(
    "other, difference",
    [
        ({"words": "lambda yield"}, "another tokenizer"),
        ({"corpus_sha256": "b" * 64}, f"other text (sha256 {'b' * 12},"),
    ],
)
def test_other_data_is_refused_with_the_workdir(tmp_path, workdir, other, difference):
    with pytest.raises(ConfigError) as error:
        check_same_data(workdir, CONFIG, prepared(tmp_path / "other", **other))
    message = str(error.value)
    assert message.startswith(f"config.data.path = 'corpus': {tmp_path / 'other'} has {difference}")
    assert f"the run in {workdir};" in message and "\n" not in message


def test_run_that_ended_before_its_first_step_may_have_had_any_data(tmp_path, workdir):
    (workdir / "metrics.jsonl").write_text("")
    check_same_data(workdir, CONFIG, prepared(tmp_path / "other", "lambda yield", "b" * 64))


def test_run_without_a_record_of_its_text_takes_any_of_its_tokenizer(tmp_path, workdir):
    (workdir / "data.json").unlink()
    check_same_data(workdir, CONFIG, prepared(tmp_path / "same_tokens", corpus_sha256="b" * 64))
    with pytest.raises(ConfigError, match="another tokenizer"):
        check_same_data(workdir, CONFIG, prepared(tmp_path / "other", "lambda yield"))


def test_workdir_without_a_tokenizer_takes_any(tmp_path, data):
    check_same_tokenizer(tmp_path, CONFIG, data)


def test_a_full_disk_leaves_the_tokenizer_that_there_is(tmp_path, workdir, data, monkeypatch):
    def half(source, target):
        pathlib.Path(target).write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", half)
    with pytest.raises(WorkdirError, match=rf"^--workdir={workdir}: cannot be written: No space left on device$"):
        save_data(workdir, prepared(tmp_path / "other", "lambda yield"))
    assert (workdir / "tokenizer.json").read_bytes() == data.tokenizer_path.read_bytes()
    assert sorted(path.name for path in workdir.iterdir()) == ["data.json", "metrics.jsonl", "tokenizer.json"]


@pytest.mark.parametrize("content", ["", "garbage", "[1]", "{}"])
def test_a_damaged_record_of_the_text_is_refused_by_name(content, workdir, data):
    (workdir / "data.json").write_text(content)
    with pytest.raises(WorkdirError, match=r"data\.json cannot be read"):
        check_same_data(workdir, CONFIG, data)
