import functools
import os
import resource
from pathlib import Path

import pytest

from sparse_lm import prepare_data
from sparse_lm.data import stages, tokenizer
from sparse_lm.errors import DataError, OutputError
from tests.command_lines import run_each
from tests.data.examples import make_documents, write_jsonl


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
    named = tmp_path / os.fsdecode(b"caf\xe9.txt")  # not UTF-8
    named.write_text("".join(make_documents(20)))
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "outputs").mkdir()
    flags = ["--vocab_size=300", "--seq_len=16", "--processes=1"]
    both = [f"--files={files}/**/*.txt", f"--files={files}/*.jsonl", "--text_field=body"]
    bad = {
        "matches no file of text": [f"--files={tmp_path}/none*.txt", f"--output={tmp_path}/none"],
        "must be a path, not a URL": [f"--files={named}", "--output=gs://bucket/data"],
        "--output=/proc/none: cannot be written": [f"--files={named}", "--output=/proc/none"],
        "exists and is not prepared data": [f"--files={named}", f"--output={tmp_path}/loop"],
    }
    good = [both, [f"--files={named}"]]
    command_lines = [[*arguments, f"--output={tmp_path}/{i}", *flags] for i, arguments in enumerate(good)]
    first, second, *refused = run_each("sparse_lm.prepare_data", [*command_lines, *bad.values()], tmp_path / "outputs")
    assert first.returncode == 0 and first.stdout.startswith(f"{tmp_path}/0: 60 documents")
    assert "tokenising held-out text: done" in first.stderr
    assert second.returncode == 0, second.stderr
    for result, message in zip(refused, bad, strict=True):
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert message in result.stderr


@pytest.mark.parametrize("part", ["files", "heldout_files"])
def test_text_that_changes_meanwhile_is_refused(files, tmp_path, monkeypatch, part):
    (tmp_path / "other").mkdir()
    write_jsonl(tmp_path / "other" / "lines.jsonl", make_documents(30, seed=2))
    changed = files / "deep" / "3.txt" if part == "files" else tmp_path / "other" / "lines.jsonl"
    arguments = dict(heldout_files=[f"{tmp_path}/other/*"], seq_len=8, vocab_size=300)
    write = stages.write

    def change_and_write(*arguments):
        changed.write_text(changed.read_text() + "\n")
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(stages, "write", change_and_write)
        with pytest.raises(DataError, match=rf"{changed} changed while it was prepared"):
            prepare_data.prepare_files([f"{files}/**/*.txt"], tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
    prepare_data.prepare_files([f"{files}/**/*.txt"], tmp_path / "out", **arguments)


def test_a_file_that_disappears_meanwhile_is_named(files, tmp_path, monkeypatch):
    train_tokenizer = stages.train_tokenizer

    def remove_and_train(*arguments):
        (files / "deep" / "3.txt").unlink()
        return train_tokenizer(*arguments)

    monkeypatch.setattr(stages, "train_tokenizer", remove_and_train)
    with pytest.raises(DataError, match=rf"cannot read {files}/deep/3.txt: .*No such file"):
        prepare_data.prepare_files([f"{files}/**/*.txt"], tmp_path / "out", seq_len=8, vocab_size=300)


@pytest.mark.parametrize("stage", ["train_tokenizer", "write_shard"])
def test_a_disk_that_fills_up_is_named_and_the_same_command_goes_on(files, tmp_path, monkeypatch, stage):
    """Libraries have errors of their own for it. No file may grow over 100 bytes once the stage has begun."""
    module = tokenizer if stage == "train_tokenizer" else stages
    unlimited, run_stage = resource.getrlimit(resource.RLIMIT_FSIZE), getattr(module, stage)

    def limit_and_run(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
        return run_stage(*arguments)

    prepare = functools.partial(prepare_data.prepare_files, [f"{files}/**/*.txt"], seq_len=8, vocab_size=300)
    with monkeypatch.context() as patch:
        patch.setattr(module, stage, limit_and_run)
        try:
            with pytest.raises(OutputError, match=r"--output=.*/out: cannot be written: .*File too large"):
                prepare(tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert prepare(tmp_path / "out").seq_len == 8


def test_documents_in_another_encoding_are_counted(files, tmp_path, caplog):
    prepare = functools.partial(prepare_data.prepare_files, [f"{files}/**/*.txt"], seq_len=8, vocab_size=300)
    prepare(tmp_path / "out")
    assert "UTF-8" not in caplog.text
    for number in (4, 7):
        with (files / "deep" / f"{number}.txt").open("ab") as file:
            file.write("Über Öfen\n".encode("latin-1"))
    prepare(tmp_path / "out")
    assert "2 of 30 documents have bytes that are not UTF-8" in caplog.text


def test_held_out_files_are_part_of_the_text_that_is_hashed_and_whose_encoding_is_checked(files, tmp_path, caplog):
    heldout = tmp_path / "heldout.txt"
    prepare = functools.partial(prepare_data.prepare_files, [f"{files}/**/*.txt"], heldout_files=[str(heldout)])
    hashes = set()
    for number, text in enumerate([b"one text", b"another text", "Über Öfen".encode("latin-1")]):
        heldout.write_bytes(text)
        data = prepare(tmp_path / f"{number}", seq_len=8, vocab_size=300)
        hashes.add(data.info["corpus_sha256"])
    assert len(hashes) == 3
    assert "1 of 31 documents have bytes that are not UTF-8" in caplog.text


def test_prepared_data_is_replaced_where_a_link_leads_nothing_else_is_and_it_is_no_source(files, tmp_path, monkeypatch):
    target, link = tmp_path / "disk" / "data", tmp_path / "out"
    link.symlink_to(target)
    prepare = functools.partial(prepare_data.prepare_files, [f"{files}/**/*.txt"], vocab_size=300)
    for seq_len in (8, 16):
        assert prepare(link, seq_len=seq_len).seq_len == seq_len
        assert link.readlink() == target
    assert {path.name for path in target.parent.iterdir()} == {"data", ".data.lock"}
    with pytest.raises(OutputError, match="exists and is not prepared data"):
        prepare(files, seq_len=8)
    source = dict(tfds=str(target), tokenizer=str(target / "tokenizer.json"))
    with pytest.raises(DataError, match=rf"--tfds={target} holds packed windows, .*: name their source"):
        prepare_data.prepare_files([], tmp_path / "again", seq_len=8, **source)  # a token of each would be repeated
    monkeypatch.chdir(target)
    with pytest.raises(OutputError, match=rf"^--output={target}: is a mount point or the current directory: name"):
        prepare(Path("."), seq_len=8)


@pytest.mark.parametrize(
    "files, options, message",
    [
        ([], {}, "no text: name it with --files or --tfds"),
        (["*.txt"], {}, "the corpus is empty"),
        (["*.txt"], {"tfds": "c4"}, "--tfds=c4 brings its own documents: leave out --files"),
        ([], {"tfds": "c4", "text_field": "body"}, "--text_field=body is for --files"),
        ([], {"tfds": "none"}, "no TFDS dataset in .*none"),
        (["*.txt"], {"tokenizer": "x", "vocab_size": 300}, "--vocab_size=300 .* but --tokenizer names one"),
    ],
)
def test_sources_that_contradict_each_other_or_hold_nothing_are_refused(tmp_path, files, options, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    with pytest.raises(DataError, match=message):
        prepare_data.prepare_files(files, Path("out"), seq_len=8, **options)
