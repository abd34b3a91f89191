import functools
import os
from pathlib import Path

import pytest

from sparse_lm import prepare_data
from sparse_lm.data import stages, workspace
from sparse_lm.data.errors import DataError
from tests.command_lines import run_each
from tests.data.examples import make_documents, make_tokenizer, write_jsonl


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "text" / "deep"
    folder.mkdir(parents=True)
    for number, text in enumerate(make_documents(30)):
        (folder / f"{number}.txt").write_text(text)
    write_jsonl(tmp_path / "text" / "lines.jsonl", make_documents(30, seed=1), field="body")
    return tmp_path / "text"


def test_files_of_several_kinds_are_prepared_together(files, tmp_path):
    patterns = [f"{files}/**/*.txt", f"{files}/*.jsonl"]
    data = prepare_data.prepare_files(
        patterns, tmp_path / "out" / "data", text_field="body", vocab_size=300, seq_len=16
    )
    assert "60 documents" in data.describe()
    assert data.seq_len == 16
    assert data.vocab_size == 300


@pytest.mark.long
def test_command_line(files, tmp_path):
    named = tmp_path / os.fsdecode(b"caf\xe9.txt")
    named.write_text("".join(make_documents(20)))
    flags = ["--vocab_size=300", "--seq_len=16", "--processes=1"]
    command_lines = [
        [f"--files={files}/**/*.txt", f"--output={tmp_path}/out", *flags],
        [f"--files={named}", f"--output={tmp_path}/other", *flags],
        [f"--files={tmp_path}/none*.txt", f"--output={tmp_path}/none"],
        [f"--files={named}", os.fsdecode(f"--output={tmp_path}/caf".encode() + b"\xe9")],
        [f"--files={named}", "--output=gs://bucket/data"],
        [f"--files={named}", f"--output={tmp_path}/loop"],
    ]
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "outputs").mkdir()
    good, other, *bad = run_each("sparse_lm.prepare_data", command_lines, tmp_path / "outputs")
    assert good.returncode == 0 and good.stdout.startswith(f"{tmp_path}/out: 30 documents")
    assert "tokenising: done" in good.stderr
    assert other.returncode == 0, other.stderr
    messages = "matches no file", "the name is not UTF-8", "must be a path, not a URL", "a link that leads to itself"
    for result, message in zip(bad, messages, strict=True):
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert message in result.stderr


def test_every_stage_shows_how_far_it_is(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(workspace, "LINE_SECONDS", 0)
    monkeypatch.setattr(stages, "WATCHED", 10)
    data = prepare_data.prepare_files([f"{files}/**/*.txt"], tmp_path / "out", vocab_size=300, seq_len=16)
    documents = data.info["splits"]["train"]["documents"]
    lines = [line.split(" | ") for line in capsys.readouterr().err.splitlines()]
    assert ["reading the text, parts 0/1", "20 documents"] in [line[:2] for line in lines]
    trained = [line[0] for line in lines if line[0].startswith("training the tokenizer")]
    assert trained[:2] == [f"training the tokenizer, documents {done}/{documents}" for done in (10, 20)]


@pytest.mark.parametrize("change", ["append", "touch", "remove"])
@pytest.mark.parametrize("part", ["files", "heldout_files"])
def test_text_that_changes_meanwhile_is_refused(files, tmp_path, monkeypatch, change, part):
    (tmp_path / "other").mkdir()
    write_jsonl(tmp_path / "other" / "lines.jsonl", make_documents(30, seed=2))
    changed = files / "deep" / "3.txt" if part == "files" else tmp_path / "other" / "lines.jsonl"
    arguments = dict(heldout_files=[f"{tmp_path}/other/*"], seq_len=8, vocab_size=300)
    tokenise = stages.tokenise

    def change_and_tokenise(*arguments):
        parts = tokenise(*arguments)
        if change == "append":
            with open(changed, "a") as file:
                file.write("\n")
        elif change == "touch":
            os.utime(changed, (1, 1))
        else:
            changed.unlink()
        return parts

    with monkeypatch.context() as patch:
        patch.setattr(stages, "tokenise", change_and_tokenise)
        with pytest.raises(DataError, match=rf"{changed}( changed while it was prepared|: .*No such file)"):
            prepare_data.prepare_files([f"{files}/**/*.txt"], tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
    if change == "append":
        prepare_data.prepare_files([f"{files}/**/*.txt"], tmp_path / "out", **arguments)


def test_prepared_data_is_replaced_and_nothing_else_is(files, tmp_path):
    output = tmp_path / "out"
    for seq_len in (8, 16):
        data = prepare_data.prepare_files([f"{files}/**/*.txt"], output, seq_len=seq_len, vocab_size=300)
        assert data.seq_len == seq_len
    with pytest.raises(DataError, match="exists and is not prepared data"):
        prepare_data.prepare_files([f"{files}/**/*.txt"], files, seq_len=8, vocab_size=300)
    assert len(list(files.glob("deep/*.txt"))) == 30


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_written(there, files, tmp_path):
    target, link = tmp_path / "disk" / "data", tmp_path / "out"
    if there:
        target.mkdir(parents=True)
    link.symlink_to(target)
    for seq_len in (8, 16):
        data = prepare_data.prepare_files([f"{files}/**/*.txt"], link, seq_len=seq_len, vocab_size=300)
        assert data.seq_len == seq_len
        assert link.readlink() == target
    assert [path.name for path in target.parent.iterdir()] == ["data"]
    assert {path.name for path in tmp_path.iterdir()} == {"text", "disk", "out"}


def test_an_output_that_cannot_be_replaced_is_refused_at_once(tmp_path, monkeypatch):
    volume = tmp_path / "volume"
    volume.mkdir()
    (tmp_path / "link").symlink_to(volume)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_mount", lambda path: path == volume)
        for output in (volume, tmp_path / "link"):
            message = rf"^--output={output}: {volume} is a mount point, .*: name a directory in it$"
            with pytest.raises(DataError, match=message):
                prepare_data.prepare_files([f"{tmp_path}/none/*.txt"], output, seq_len=8)
    monkeypatch.chdir(volume)
    with pytest.raises(DataError, match=rf"^--output=\.: {volume} is the current directory, .*: name a directory"):
        prepare_data.prepare_files([f"{tmp_path}/none/*.txt"], Path("."), seq_len=8)
    assert {path.name for path in tmp_path.rglob("*")} == {"volume", "link"}


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


def test_a_named_tokenizer_is_used(files, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    arguments = dict(seq_len=8, tokenizer=str(tmp_path / "tokenizer.json"))
    data = prepare_data.prepare_files([f"{files}/**/*.txt"], tmp_path / "out", **arguments)
    assert data.vocab_size == tokenizer.get_vocab_size()
    with pytest.raises(DataError, match=r"--vocab_size=300 .* but --tokenizer names one"):
        prepare_data.prepare_files([f"{files}/**/*.txt"], tmp_path / "out", vocab_size=300, **arguments)


def test_a_dataset_that_is_not_there_is_refused_by_the_flag(tmp_path):
    with pytest.raises(DataError, match=r"--tfds=.*none: no directory"):
        prepare_data.prepare_files([], tmp_path / "out", seq_len=8, tfds=str(tmp_path / "none"))


def test_prepared_data_is_no_source(files, tmp_path):
    data = prepare_data.prepare_files([f"{files}/**/*.txt"], tmp_path / "a" / "data", seq_len=8, vocab_size=300)
    for tfds in (data.directory, tmp_path / "a"):  # windows overlap: a token of each would be repeated
        with pytest.raises(DataError, match=rf"--tfds={tfds}: .*/a/data holds packed windows, .*: name their source"):
            prepare_data.prepare_files(
                [], tmp_path / "out", seq_len=8, tfds=str(tfds), tokenizer=str(data.tokenizer_path)
            )


def test_files_without_text_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="the corpus is empty"):
        prepare_data.prepare_files([f"{tmp_path}/*.txt"], tmp_path / "out", seq_len=8)
