"""A preparation that is stopped, at whatever point, goes on and ends with the same bytes."""

import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from sparse_lm.data import builder, corpus, stages
from sparse_lm.data.corpus import find_files
from sparse_lm.data.dataset import open_prepared
from tests.command_lines import run_python
from tests.data.examples import Documents, make_documents, make_tokenizer, write_c4, write_dclm

SEQ_LEN = 16


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """Several parts and shards of a corpus that is quickly read."""
    monkeypatch.setattr(corpus, "PART_BYTES", 1)
    monkeypatch.setattr(stages, "SHARD_BYTES", 8000)


@pytest.fixture
def uninterrupted(tmp_path) -> dict[str, bytes]:
    documents, folder = make_documents(150), tmp_path / "text"
    folder.mkdir()
    write_c4(folder / "c4-train.00000-of-01024.json.gz", documents[:60])
    write_dclm(folder / "shard_00000000_processed.jsonl.zst", documents[60:])
    builder.prepare(tmp_path / "whole", find_files([f"{folder}/*"]), seq_len=SEQ_LEN, vocab_size=300)
    return contents(tmp_path / "whole")


# Each attempt runs in a child that kills itself just before it moves the n-th file to its place, the second (between
# tokens and the file that counts them) and the third in turns: it ends, since what is finished is not done again.
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
while attempt(2 + attempts % 2):
    assert not directory.exists()
    attempts += 1
print(attempts)
"""


def test_kills_before_every_file_is_finished_change_nothing(tmp_path, uninterrupted):
    result = run_python("-c", KILLED_EVERYWHERE, f"{tmp_path}/text/*", str(tmp_path / "killed"))
    assert int(result.stdout) > 10
    assert contents(tmp_path / "killed") == uninterrupted
    assert {path.name for path in tmp_path.iterdir()} == {"text", "whole", "killed", ".whole.lock", ".killed.lock"}


@pytest.mark.long
def test_processes_change_nothing_and_parts_and_shards_nothing_but_files(tmp_path, uninterrupted, monkeypatch):
    files = find_files([f"{tmp_path}/text/*"])
    arguments = dict(seq_len=SEQ_LEN, vocab_size=300)
    builder.prepare(tmp_path / "several", files, processes=2, **arguments)
    assert contents(tmp_path / "several") == uninterrupted
    monkeypatch.setattr(corpus, "PART_BYTES", 2**30)
    monkeypatch.setattr(stages, "SHARD_BYTES", 2**30)
    builder.prepare(tmp_path / "large", files, **arguments)
    assert len(uninterrupted) > len(contents(tmp_path / "large"))
    small, large = open_prepared(tmp_path / "whole"), open_prepared(tmp_path / "large")
    assert small.info["splits"] == large.info["splits"]
    every = np.arange(len(small.train))
    np.testing.assert_array_equal(small.train.read(every), large.train.read(every))


def test_another_length_takes_nothing_of_a_run_that_was_stopped(tmp_path, monkeypatch):
    documents = Documents(make_documents(60))
    arguments = dict(tokenizer=make_tokenizer())

    def write_never(**_):
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(stages.tfds.folder_dataset, "write_metadata", write_never)
        builder.prepare(tmp_path / "data", documents, seq_len=8, **arguments)
    builder.prepare(tmp_path / "data", documents, seq_len=32, **arguments)
    builder.prepare(tmp_path / "fresh", documents, seq_len=32, **arguments)
    assert contents(tmp_path / "data") == contents(tmp_path / "fresh")


def test_two_preparations_of_the_same_take_turns(tmp_path):
    arguments = dict(seq_len=SEQ_LEN, tokenizer=make_tokenizer())
    documents = Documents(make_documents(60))
    second = threading.Thread(target=builder.prepare, args=(tmp_path / "data", documents), kwargs=arguments)
    with builder.locked(tmp_path / ".data.lock"):
        second.start()
        time.sleep(0.2)
        assert second.is_alive()
        builder.prepare(tmp_path / "elsewhere", documents, **arguments)
        (tmp_path / "elsewhere").rename(tmp_path / "data")
        stamp = (tmp_path / "data" / "metadata.json").stat().st_mtime_ns
    second.join()
    assert (tmp_path / "data" / "metadata.json").stat().st_mtime_ns == stamp  # what the first one made will do


def test_what_is_half_deleted_is_no_work_to_go_on_from(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    builder._begin(folder, "one")
    (folder / "result").write_text("")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(builder.shutil, "rmtree", mock.Mock(side_effect=KeyboardInterrupt))
        builder._begin(folder, "another")
    builder._begin(folder, "one")
    assert not (folder / "result").exists()
