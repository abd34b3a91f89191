import functools
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from tokenizers.normalizers import Replace

from sparse_lm import prepare_data
from sparse_lm.data import corpus, packing, tokenizer
from sparse_lm.data.dataset import Data, open_prepared
from sparse_lm.errors import DataError, OutputError
from tests.command_lines import run_each
from tests.data.examples import make_documents, make_tokenizer, write_c4, write_dclm, write_jsonl


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
    (tmp_path / "outputs").mkdir()
    flags = ["--vocab_size=300", "--seq_len=16", "--processes=1"]
    both = [f"--files={files}/**/*.txt", f"--files={files}/*.jsonl", "--text_field=body"]
    bad = {
        "--heldout_files=: must not be empty": [f"--files={named}", "--heldout_files=", f"--output={tmp_path}/none"],
        "--tokenizer=: must not be empty": [f"--files={named}", "--tokenizer=", f"--output={tmp_path}/none"],
        "must be a path, not a URL": [f"--files={named}", "--output=gs://bucket/data"],
    }
    good = [both, [f"--files={named}"]]
    command_lines = [[*arguments, f"--output={tmp_path}/{i}", *flags] for i, arguments in enumerate(good)]
    first, second, *refused = run_each("sparse_lm.prepare_data", [*command_lines, *bad.values()], tmp_path / "outputs")
    assert first.returncode == 0 and first.stdout.startswith(f"{tmp_path}/0: 60 documents")
    assert 1 < float(first.stdout.split(" tokens of ")[1].split(" bytes")[0]) < 4
    assert "tokenising held-out text: done" in first.stderr
    assert second.returncode == 0, second.stderr
    for result, message in zip(refused, bad, strict=True):
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert message in result.stderr


@pytest.mark.long
def test_processes_change_nothing_and_parts_and_shards_nothing_but_files(tmp_path, monkeypatch):
    documents = make_documents(150)
    write_c4(tmp_path / "c4-train.00000-of-01024.json.gz", documents[:60])
    write_dclm(tmp_path / "shard_00000000_processed.jsonl.zst", documents[60:])

    def prepare(name: str, size: int, processes: int) -> Data:
        monkeypatch.setattr(corpus, "PART_BYTES", size)
        monkeypatch.setattr(packing, "SHARD_BYTES", 8000 * size)
        arguments = dict(seq_len=16, vocab_size=300, processes=processes)
        return prepare_data.prepare_files([f"{tmp_path}/*.gz", f"{tmp_path}/*.zst"], tmp_path / name, **arguments)

    data = small, _, large = prepare("small", 1, 1), prepare("several", 1, 2), prepare("large", 2**30, 1)
    first, second, third = ({path.name: path.read_bytes() for path in d.directory.iterdir()} for d in data)
    assert first == second and len(first) > len(third)
    assert small.info["splits"] == large.info["splits"]
    every = np.arange(len(small.train))
    np.testing.assert_array_equal(small.train.read(every), large.train.read(every))


def test_a_file_that_disappears_meanwhile_is_named(files, tmp_path, monkeypatch):
    train_tokenizer = tokenizer.train_tokenizer

    def remove_and_train(*arguments):
        (files / "deep" / "3.txt").unlink()
        return train_tokenizer(*arguments)

    monkeypatch.setattr(tokenizer, "train_tokenizer", remove_and_train)
    with pytest.raises(DataError, match=rf"cannot read {files}/deep/3.txt: .*No such file"):
        prepare_data.prepare_files([f"{files}/**/*.txt"], tmp_path / "out", seq_len=8, vocab_size=300)


@pytest.mark.parametrize("module, stage", [(tokenizer, "train_tokenizer"), (packing, "write_shard")])
def test_a_disk_that_fills_up_is_named_and_nothing_is_left(files, tmp_path, monkeypatch, module, stage):
    """Libraries have errors of their own for it. No file may grow over 100 bytes once the stage has begun."""
    unlimited, run_stage = resource.getrlimit(resource.RLIMIT_FSIZE), getattr(module, stage)

    def limit_and_run(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
        return run_stage(*arguments)

    monkeypatch.setattr(module, stage, limit_and_run)
    try:
        with pytest.raises(OutputError, match=r"--output=.*/out: cannot be written: .*File too large"):
            prepare_data.prepare_files([f"{files}/**/*.txt"], tmp_path / "out", seq_len=8, vocab_size=300)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert list(tmp_path.iterdir()) == [files]


def test_what_another_process_has_prepared_meanwhile_stays(files, tmp_path, monkeypatch):
    prepare = functools.partial(prepare_data.prepare_files, [f"{files}/**/*.txt"], tmp_path / "out", vocab_size=300)
    write = packing.write

    def write_after_another(*arguments):
        monkeypatch.undo()
        prepare(seq_len=16)
        write(*arguments)

    monkeypatch.setattr(packing, "write", write_after_another)
    with pytest.raises(OutputError, match=r"--output=.*/out: cannot be written: Directory not empty"):
        prepare(seq_len=8)
    assert open_prepared(tmp_path / "out").seq_len == 16 and len(list(tmp_path.iterdir())) == 2


def test_held_out_files_are_part_of_the_text_that_is_hashed_and_documents_in_another_encoding_are_counted(
    files, tmp_path, caplog
):
    heldout, hashes = tmp_path / "heldout.txt", set()
    for text in (b"one text", b"another text", "Über Öfen".encode("latin-1")):
        assert "UTF-8" not in caplog.text
        heldout.write_bytes(text)
        options = dict(heldout_files=[str(heldout)], seq_len=8, vocab_size=300)
        data = prepare_data.prepare_files([f"{files}/**/*.txt"], tmp_path / str(len(hashes)), **options)
        hashes.add(data.info["corpus_sha256"])
    assert len(hashes) == 3
    assert "1 of 31 documents have bytes that are not UTF-8" in caplog.text


def test_held_out_documents_that_are_trained_on_are_counted(tmp_path, caplog):
    documents = [f"text {number}" for number in range(40)]
    for name, some in (("train", documents[:30]), ("apart", documents[30:]), ("among", documents[27:])):
        write_jsonl(tmp_path / f"{name}.jsonl", some)
    for name in ("apart", "among"):
        assert "held out, too" not in caplog.text
        options = dict(heldout_files=[f"{tmp_path}/{name}.jsonl"], seq_len=8, vocab_size=300)
        prepare_data.prepare_files([f"{tmp_path}/train.jsonl"], tmp_path / name, **options)
    assert "3 of the training documents are held out, too" in caplog.text


def test_text_of_less_than_a_window_is_pointed_out(files, tmp_path, caplog):
    heldout = tmp_path / "heldout.txt"
    options = dict(heldout_files=[str(heldout)], seq_len=8, vocab_size=300)
    for text, said in (("one text", []), ("a", ["the held-out text has 2 tokens: a window of 8 repeats them"])):
        heldout.write_text(text)
        prepare_data.prepare_files([f"{files}/**/*.txt"], tmp_path / f"of {text}", **options)
        assert [record.getMessage().partition(",")[0] for record in caplog.records if "repeats" in record.msg] == said


def test_data_appear_where_a_link_leads_replace_nothing_and_are_no_source(files, tmp_path, monkeypatch):
    target, link = tmp_path / "disk" / "data", tmp_path / "out"
    link.symlink_to(target)
    prepare = functools.partial(prepare_data.prepare_files, [f"{files}/**/*.txt"], vocab_size=300)
    assert prepare(link, seq_len=8).directory == link and link.readlink() == target
    assert {path.name for path in target.parent.iterdir()} == {"data"}
    with pytest.raises(OutputError, match=rf"^--output={link}: must be a new or an empty directory"):
        prepare(link, seq_len=16)
    with pytest.raises(DataError, match=rf"^{target} has no feature 'text', a string a record, but tokens"):
        prepare_data.prepare_files([], tmp_path / "again", seq_len=8, tfds=str(target))
    assert open_prepared(target).seq_len == 8
    target.rename(tmp_path / "elsewhere")
    target.symlink_to(link)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for output in (link, here):
        with pytest.raises(OutputError, match=rf"^--output={output}: must be a new or an empty directory"):
            prepare(output, seq_len=8)


@pytest.mark.parametrize(
    "files, options, message",
    [
        ([], {}, "no text: name it with --files or --tfds"),
        (["*.txt"], {}, "the corpus is empty"),
        (["*.md"], {"heldout_files": ["*.txt"]}, "the held-out text is empty"),
        (["*.txt"], {"tfds": "c4"}, "--tfds=c4 brings its own documents: leave out --files"),
        ([], {"tfds": "c4", "text_field": "body"}, "--text_field=body is for --files"),
        ([], {"tfds": "none"}, "no TFDS dataset in .*none"),
        (["*.txt"], {"tokenizer": "x", "vocab_size": 300}, "--vocab_size=300 .* but --tokenizer names one"),
    ],
)
def test_sources_that_contradict_each_other_or_hold_nothing_are_refused(tmp_path, files, options, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    Path("text.md").write_text("text")
    with pytest.raises(DataError, match=message):
        prepare_data.prepare_files(files, Path("out"), seq_len=8, **options)


def test_a_tokenizer_that_loses_text_is_pointed_out(tmp_path, caplog):
    (tmp_path / "text.txt").write_text("some words, ß and 漢字\n" * 400)
    own = make_tokenizer()
    for lossy in (False, True):
        assert "bits per byte are off" not in caplog.text
        if lossy:
            own.normalizer = Replace("words", "")
        own.save(str(tmp_path / "tokenizer.json"))
        options = dict(seq_len=8, tokenizer=str(tmp_path / "tokenizer.json"))
        prepare_data.prepare_files([f"{tmp_path}/text.txt"], tmp_path / f"lossy {lossy}", **options)
    assert "the tokens spell 8,400 bytes of a text of 10,400: the tokenizer changes it" in caplog.text
