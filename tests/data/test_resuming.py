"""A preparation that is stopped, at whatever point, goes on and ends with the same bytes."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from sparse_lm.data import builder, corpus, stages
from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.corpus import find_files
from sparse_lm.data.dataset import open_prepared
from sparse_lm.data.errors import DataError
from sparse_lm.data.workers import Workers
from sparse_lm.data.workspace import open_workspace
from tests.data.examples import Documents, make_documents, make_tokenizer, write_c4, write_dclm

ROOT = Path(__file__).parents[2]
SEQ_LEN = 16


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def write_shards(folder: Path) -> str:
    documents = make_documents(150)
    folder.mkdir()
    write_c4(folder / "c4-train.00000-of-01024.json.gz", documents[:60])
    write_dclm(folder / "shard_00000000_processed.jsonl.zst", documents[60:])
    return f"{folder}/*"


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """Several parts and shards of a corpus that is quickly read."""
    monkeypatch.setattr(corpus, "PART_BYTES", 1)
    monkeypatch.setattr(stages, "SHARD_BYTES", 8000)


@pytest.fixture
def uninterrupted(tmp_path) -> dict[str, bytes]:
    builder.prepare(tmp_path / "whole", find_files([write_shards(tmp_path / "text")]), seq_len=SEQ_LEN, vocab_size=300)
    return contents(tmp_path / "whole")


# Each attempt runs in a child that kills itself just before it moves the n-th file to its place: the second (between
# a file and the result that tells of it) and the third in turns, until the directory is there; then the first.
KILLED_EVERYWHERE = """
import os, signal, sys
from pathlib import Path
from sparse_lm.data import builder, corpus, stages
from sparse_lm.data.corpus import find_files

corpus.PART_BYTES, stages.SHARD_BYTES = 1, 8000
pattern, directory = sys.argv[1], Path(sys.argv[2])
rename = Path.rename

def attempt(kill_at):
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = []
    def rename_or_die(self, target):
        calls.append(target)
        if len(calls) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)
    Path.rename = rename_or_die
    builder.prepare(directory, find_files([pattern]), seq_len=16, vocab_size=300)
    os._exit(0)

attempts = 0
while not directory.exists():
    assert attempt(2 + attempts % 2) == -signal.SIGKILL
    attempts += 1
assert attempt(1) == -signal.SIGKILL
assert attempt(1000) == 0
print(attempts)
"""


def test_kills_before_every_file_is_finished_change_nothing(tmp_path, uninterrupted):
    arguments = [f"{tmp_path}/text/*", str(tmp_path / "killed")]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED_EVERYWHERE, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 20
    assert contents(tmp_path / "killed") == uninterrupted
    assert {path.name for path in tmp_path.iterdir()} == {"text", "whole", "killed"}


@pytest.mark.long
def test_parts_shards_and_processes_change_nothing_but_files(tmp_path, uninterrupted, monkeypatch):
    monkeypatch.setattr(corpus, "PART_BYTES", 2**30)
    monkeypatch.setattr(stages, "SHARD_BYTES", 2**30)
    files = find_files([f"{tmp_path}/text/*"])
    builder.prepare(tmp_path / "large", files, seq_len=SEQ_LEN, vocab_size=300, processes=2)
    assert len(uninterrupted) > len(contents(tmp_path / "large"))
    small, large = open_prepared(tmp_path / "whole"), open_prepared(tmp_path / "large")
    assert small.info == large.info
    every = np.arange(len(small.train))
    np.testing.assert_array_equal(small.train.read(every), large.train.read(every))


def test_files_that_were_tokenised_before_an_error_are_not_tokenised_again(tmp_path, monkeypatch, uninterrupted):
    pattern = f"{tmp_path}/text/*"
    tokenised = []
    tokenize = tokenizer_lib.tokenize

    def counting(documents, tokenizer):
        for tokens in tokenize(documents, tokenizer):
            tokenised.append(tokens.tobytes())
            if len(tokenised) == 100:
                raise DataError("the disk is gone")
            yield tokens

    monkeypatch.setattr(tokenizer_lib, "tokenize", counting)
    directory = tmp_path / "data"
    arguments = dict(seq_len=SEQ_LEN, vocab_size=300)
    with pytest.raises(DataError, match="the disk is gone"):
        builder.prepare(directory, find_files([pattern]), **arguments)
    with pytest.raises(DataError):
        open_prepared(directory)
    builder.prepare(directory, find_files([pattern]), **arguments)
    assert contents(directory) == uninterrupted
    first, again = tokenised[:50], tokenised[100:]  # of 60 in the first file, of which some are held out
    assert len(again) < 100 and not set(first) & set(again)


def test_another_length_takes_nothing_of_a_run_that_was_stopped(tmp_path, monkeypatch):
    documents = Documents(make_documents(60))
    arguments = dict(tokenizer=make_tokenizer())

    def write_never(**_):
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(builder.tfds.folder_dataset, "write_metadata", write_never)
        builder.prepare(tmp_path / "data", documents, seq_len=8, **arguments)
    builder.prepare(tmp_path / "data", documents, seq_len=32, **arguments)
    builder.prepare(tmp_path / "fresh", documents, seq_len=32, **arguments)
    assert contents(tmp_path / "data") == contents(tmp_path / "fresh")


def test_two_preparations_of_the_same_take_turns(tmp_path):
    source = {"from": "a test"}
    arguments = dict(seq_len=SEQ_LEN, tokenizer=make_tokenizer(), source=source)
    second = threading.Thread(
        target=builder.prepare, args=(tmp_path / "data", Documents(make_documents(60))), kwargs=arguments
    )
    with open_workspace(tmp_path / "data", Workers(1)):
        second.start()
        time.sleep(0.2)
        assert second.is_alive()
        builder.prepare(tmp_path / "elsewhere", Documents(make_documents(60)), **arguments)
        (tmp_path / "elsewhere").rename(tmp_path / "data")
        stamp = (tmp_path / "data" / "metadata.json").stat().st_mtime_ns
    second.join()
    assert (tmp_path / "data" / "metadata.json").stat().st_mtime_ns == stamp  # what the first one made will do
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
