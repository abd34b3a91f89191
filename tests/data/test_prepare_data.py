import functools
import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from sparse_lm import prepare_data
from sparse_lm.data import stages
from sparse_lm.data.errors import DataError
from tests.command_lines import run_each
from tests.data.examples import make_documents, make_tokenizer, write_jsonl, write_tfds


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "text" / "deep"
    folder.mkdir(parents=True)
    for number, text in enumerate(make_documents(30)):
        (folder / f"{number}.txt").write_text(text)
    write_jsonl(tmp_path / "text" / "lines.jsonl", make_documents(30, seed=1), field="body")
    return tmp_path / "text"


@pytest.mark.long
def test_command_line(files, tmp_path):
    named = tmp_path / os.fsdecode(b"caf\xe9.txt")
    named.write_text("".join(make_documents(20)))
    flags = ["--vocab_size=300", "--seq_len=16", "--processes=1"]
    both = [f"--files={files}/**/*.txt", f"--files={files}/*.jsonl", "--text_field=body"]
    command_lines = [
        [*both, f"--output={tmp_path}/out", *flags],
        [f"--files={named}", f"--output={tmp_path}/other", *flags],
        [f"--files={tmp_path}/none*.txt", f"--output={tmp_path}/none"],
        [f"--files={named}", os.fsdecode(f"--output={tmp_path}/caf".encode() + b"\xe9")],
        [f"--files={named}", "--output=gs://bucket/data"],
        [f"--files={named}", f"--output={tmp_path}/loop"],
    ]
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "outputs").mkdir()
    good, other, *bad = run_each("sparse_lm.prepare_data", command_lines, tmp_path / "outputs")
    assert good.returncode == 0 and good.stdout.startswith(f"{tmp_path}/out: 60 documents")
    assert "tokenising: done" in good.stderr
    assert other.returncode == 0, other.stderr
    messages = (
        "matches no file",
        "the name is not UTF-8",
        "must be a path, not a URL",
        "exists and is not prepared data",
    )
    for result, message in zip(bad, messages, strict=True):
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert message in result.stderr


@pytest.mark.parametrize("part", ["files", "heldout_files"])
def test_text_that_changes_meanwhile_is_refused(files, tmp_path, monkeypatch, part):
    (tmp_path / "other").mkdir()
    write_jsonl(tmp_path / "other" / "lines.jsonl", make_documents(30, seed=2))
    changed = files / "deep" / "3.txt" if part == "files" else tmp_path / "other" / "lines.jsonl"
    arguments = dict(heldout_files=[f"{tmp_path}/other/*"], seq_len=8, vocab_size=300)
    tokenise = stages.tokenise

    def change_and_tokenise(*arguments):
        parts = tokenise(*arguments)
        changed.write_text(changed.read_text() + "\n")
        return parts

    with monkeypatch.context() as patch:
        patch.setattr(stages, "tokenise", change_and_tokenise)
        with pytest.raises(DataError, match=rf"{changed} changed while it was prepared"):
            prepare_data.prepare_files([f"{files}/**/*.txt"], tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
    prepare_data.prepare_files([f"{files}/**/*.txt"], tmp_path / "out", **arguments)


def test_prepared_data_is_replaced_and_nothing_else_is(files, tmp_path):
    output = tmp_path / "out"
    for seq_len in (8, 16):
        data = prepare_data.prepare_files([f"{files}/**/*.txt"], output, seq_len=seq_len, vocab_size=300)
        assert data.seq_len == seq_len
    with pytest.raises(DataError, match="exists and is not prepared data"):
        prepare_data.prepare_files([f"{files}/**/*.txt"], files, seq_len=8, vocab_size=300)
    assert len(list(files.glob("deep/*.txt"))) == 30


def test_a_link_stays_and_what_it_leads_to_is_written(files, tmp_path):
    target, link = tmp_path / "disk" / "data", tmp_path / "out"
    link.symlink_to(target)
    for seq_len in (8, 16):
        data = prepare_data.prepare_files([f"{files}/**/*.txt"], link, seq_len=seq_len, vocab_size=300)
        assert data.seq_len == seq_len
        assert link.readlink() == target
    assert {path.name for path in target.parent.iterdir()} == {"data", ".data.lock"}
    assert {path.name for path in tmp_path.iterdir()} == {"text", "disk", "out"}


def test_an_output_that_cannot_be_replaced_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"^--output=\.: {tmp_path} is a mount point or the current directory: name"):
        prepare_data.prepare_files([f"{tmp_path}/none/*.txt"], Path("."), seq_len=8)


def test_the_same_data_is_left_as_it_is_unless_it_is_damaged(files, tmp_path):
    prepare = functools.partial(
        prepare_data.prepare_files, [f"{files}/**/*.txt"], tmp_path / "out", seq_len=8, vocab_size=300
    )
    made = prepare()
    shards = sorted(made.directory.glob("*.array_record*"))
    times = [path.stat().st_mtime_ns for path in shards]
    assert prepare().info == made.info
    assert [path.stat().st_mtime_ns for path in shards] == times
    content = shards[0].read_bytes()
    shards[0].write_bytes(content[:-10])
    prepare()
    assert shards[0].read_bytes() == content


@pytest.mark.parametrize(
    "files, options, message",
    [
        ([], {}, "no text: name it with --files or --tfds"),
        (["{folder}/*.txt"], {}, "the corpus is empty"),
        (["{folder}/*.txt"], {"tfds": "c4"}, "--tfds=c4 brings its own documents: leave out --files"),
        ([], {"tfds": "{folder}/none"}, r"--tfds=.*none: no directory"),
        ([], {"tfds": "{folder}/tokens"}, "holds tokens: name their tokenizer with --tokenizer"),
        (
            ["{folder}/*.txt"],
            {"tokenizer": "{folder}/tokenizer.json", "vocab_size": 300},
            "--vocab_size=300 .* but --tokenizer names one",
        ),
    ],
)
def test_sources_that_contradict_each_other_or_hold_nothing_are_refused(tmp_path, files, options, message):
    (tmp_path / "empty.txt").write_text("")
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    if "tokens" in options.get("tfds", ""):
        feature = tfds.features.Tensor(shape=(None,), dtype=np.int64)
        write_tfds(tmp_path / "tokens", {"tokens": feature}, train=[{"tokens": np.arange(5)}])

    def placed(value):
        return value.format(folder=tmp_path) if isinstance(value, str) else value

    options = {name: placed(value) for name, value in options.items()}
    with pytest.raises(DataError, match=message):
        prepare_data.prepare_files([*map(placed, files)], tmp_path / "out", seq_len=8, **options)


def test_prepared_data_is_no_source(files, tmp_path):
    data = prepare_data.prepare_files([f"{files}/**/*.txt"], tmp_path / "a" / "data", seq_len=8, vocab_size=300)
    for folder in (data.directory, tmp_path / "a"):  # windows overlap: a token of each would be repeated
        with pytest.raises(DataError, match=rf"--tfds={folder}: .*/a/data holds packed windows, .*: name their source"):
            prepare_data.prepare_files(
                [], tmp_path / "out", seq_len=8, tfds=str(folder), tokenizer=str(data.tokenizer_path)
            )
