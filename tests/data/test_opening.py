import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from sparse_lm.config import Config, DataConfig, ModelConfig
from sparse_lm.data import builder, corpus, dataset, opening, packing
from sparse_lm.data.corpus import TextFiles
from sparse_lm.data.opening import open_data
from sparse_lm.data.pipeline import train_batches
from sparse_lm.data.tokenizer import fingerprint, train_tokenizer
from sparse_lm.errors import ConfigError, DataError
from tests.data import examples
from tests.data.examples import Documents, damage_records, make_documents, make_tokenizer, write_jsonl

SEQ_LEN = 32
TOKENIZER = make_tokenizer()
DOCUMENTS = Documents(make_documents(120))


@pytest.fixture
def config(tmp_path, monkeypatch) -> Config:
    """A run on a small stand-in for the embedded corpus."""
    write_jsonl(tmp_path / "library.jsonl", DOCUMENTS)
    monkeypatch.setattr(opening, "python_library", lambda: TextFiles((tmp_path / "library.jsonl",)))
    data = DataConfig(cache_dir=str(tmp_path / "cache"))
    return Config(seq_len=SEQ_LEN, model=ModelConfig(vocab_size=500), data=data)


@pytest.fixture
def tokenizer_path(tmp_path) -> str:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


@pytest.fixture
def path(tmp_path) -> str:
    builder.prepare(tmp_path / "prepared", DOCUMENTS, seq_len=SEQ_LEN, tokenizer=TOKENIZER)
    return str(tmp_path / "prepared")


def changed(config: Config, group: str, **changes) -> Config:
    return dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **changes)})


def all_windows(windows) -> np.ndarray:
    return windows.read(np.arange(len(windows)))


# The embedded corpus.


def test_it_is_prepared_once_for_its_text_vocabulary_and_length(config, tmp_path, tokenizer_path):
    variants = [
        config,
        changed(config, "model", vocab_size=300),
        dataclasses.replace(config, seq_len=16),
        changed(config, "data", tokenizer=tokenizer_path),
    ]
    first, *others = opened = [open_data(variant) for variant in variants]
    stamp = (first.directory / "metadata.json").stat().st_mtime_ns
    assert open_data(config).directory == first.directory
    assert (first.directory / "metadata.json").stat().st_mtime_ns == stamp
    write_jsonl(tmp_path / "library.jsonl", make_documents(60))
    opened.append(open_data(config))
    assert len({data.directory for data in opened}) == 5
    assert [data.seq_len for data in opened] == [32, 32, 16, 32, 32]
    assert first.vocab_size <= 500 and others[0].vocab_size <= 300
    assert others[2].vocab_size == TOKENIZER.get_vocab_size()
    train, _, found = examples.held_out(DOCUMENTS)
    assert first.info["corpus_sha256"] == found.sha256
    assert first.info["tokenizer_sha256"] == fingerprint(train_tokenizer(train, 500))  # of what is held out it saw none
    stream = examples.stream_of(list(train), TOKENIZER.from_file(str(first.tokenizer_path)))
    np.testing.assert_array_equal(examples.targets_of(first.train)[: len(stream)], stream)


@pytest.mark.parametrize("damage", ["cut shard", "other tokenizer", "no metadata", "a loop of links"])
def test_a_damaged_cache_is_rebuilt(config, damage, caplog):
    caplog.set_level("INFO")
    data = open_data(config)
    assert "(config.data.path is empty): " in caplog.text and f"{data.directory} does not exist" in caplog.text
    expected, tokenizer = all_windows(data.train), data.tokenizer_path.read_bytes()
    shard = next(data.directory.glob("*train*"))
    if damage == "cut shard":
        os.truncate(shard, shard.stat().st_size // 2)
    elif damage == "other tokenizer":
        TOKENIZER.save(str(data.tokenizer_path))
    elif damage == "no metadata":
        (data.directory / "metadata.json").write_text("{")
    else:
        (metadata := data.directory / "metadata.json").unlink()
        metadata.symlink_to(metadata)
    np.testing.assert_array_equal(all_windows(open_data(config).train), expected)
    assert data.tokenizer_path.read_bytes() == tokenizer


def test_what_another_process_has_prepared_meanwhile_is_opened(config, monkeypatch):
    write, inodes = packing.write, []

    def write_after_another(*arguments):
        monkeypatch.setattr(packing, "write", write)
        inodes.append(open_data(config).directory.stat().st_ino)
        write(*arguments)

    monkeypatch.setattr(packing, "write", write_after_another)
    assert [open_data(config).directory.stat().st_ino] == inodes


def test_the_real_library_is_prepared_of_sorted_source_without_tests_and_packages(tmp_path, monkeypatch):
    paths = corpus.python_library().paths
    assert list(paths) == sorted(paths) and len(paths) > 300
    assert not any({"site-packages", "test", "tests"} & set(path.parts) for path in paths)
    monkeypatch.setattr(corpus, "LIBRARY_FILE_LIMIT", 8 * 2**10)  # the small files, to be quick
    data = open_data(changed(Config(data=DataConfig(cache_dir=str(tmp_path))), "model", vocab_size=512))
    assert len(data.train) > 500 and next(train_batches(data, batch_size=4, seed=0)).max() < 512


def test_a_link_that_leads_nowhere_and_a_table_are_no_source_of_the_library(tmp_path, monkeypatch):
    for name, size in (("whole.py", corpus.LIBRARY_FILE_LIMIT), ("table.py", corpus.LIBRARY_FILE_LIMIT + 1)):
        (tmp_path / name).write_text("#" * size)
    (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "none.py")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    assert corpus.python_library().paths == (tmp_path / "whole.py",)


# Prepared windows.


def test_what_does_not_go_with_the_data_is_refused_by_its_key(config, path, tokenizer_path, tmp_path):
    (tmp_path / "file").write_text("")
    other, size, end = str(tmp_path / "other.json"), TOKENIZER.get_vocab_size(), TOKENIZER.token_to_id("<|endoftext|>")
    make_tokenizer(300).save(other)
    builder.prepare(tmp_path / "other", DOCUMENTS, seq_len=SEQ_LEN, tokenizer=make_tokenizer(300))
    builder.prepare(tmp_path / "short", DOCUMENTS, seq_len=8, tokenizer=TOKENIZER)
    prepared = changed(config, "data", path=path)
    named = changed(config, "data", tokenizer=tokenizer_path)
    mixtures = {
        f"{path}:1,{tmp_path}/other:1": r"data\.path = .*/other has another tokenizer than .*/prepared: prepare",
        f"{path}:1,{tmp_path}/short:1": r"seq_len = 32: must be 8, with which .*/short",
        f"{path}:1e-1,{tmp_path}/none:1": r"data\.path = '.*': .*/none does not exist",
        str(tmp_path): r"data\.path = .*: .* is not prepared data: make it with",
    }
    for second in (f",{path}", ":1,", f":0,{path}x:1", f":1,{path}:1", f":1,{path}/:1", f":1,{path}x:1{'0' * 309}"):
        mixtures[path + second] = "data.path = .* must be a directory, or several different ones with"
    for refused, message in (
        (changed(config, "model", vocab_size=256), r"model\.vocab_size = 256: must be at least 257"),
        (changed(named, "model", vocab_size=size - 1), rf"model\.vocab_size = {size - 1}: must be at least {size}"),
        (changed(config, "data", tokenizer="no.json"), r"data\.tokenizer = 'no\.json': cannot read no\.json: No such"),
        (changed(config, "data", cache_dir=str(tmp_path / "file")), r"data\.cache_dir = '.*/file': must be writable"),
        (dataclasses.replace(prepared, seq_len=64), rf"seq_len = 64: must be {SEQ_LEN}, with which"),
        (changed(prepared, "model", vocab_size=300), r"model\.vocab_size = 300: must be at least"),
        (changed(prepared, "model", document_separator=9), rf"model.*separator = 9: must be {end}, the end of text"),
        (changed(prepared, "data", tokenizer=other), r"data\.tokenizer = '.*': must be the one of the"),
        *((changed(config, "data", path=mixture), message) for mixture, message in mixtures.items()),
    ):
        with pytest.raises(ConfigError, match=rf"^config\.{message}"):
            open_data(refused)
    assert (open_data(changed(prepared, "model", document_separator=end)).train[0] == end).any()


def test_they_are_read_where_they_are_and_several_are_mixed_by_weight(config, path, tokenizer_path, tmp_path):
    for tokenizer in ("", tokenizer_path):
        assert open_data(changed(config, "data", path=path, tokenizer=tokenizer)).directory == Path(path)
    assert not Path(config.data.cache_dir).exists()
    builder.prepare(tmp_path / "b", Documents(make_documents(60, seed=5)), seq_len=SEQ_LEN, tokenizer=TOKENIZER)
    data = open_data(changed(config, "data", path=f"{path}:0.6, {tmp_path}/b:.2"))
    parts = [open_data(changed(config, "data", path=part)) for part in (path, str(tmp_path / "b"))]
    assert len(data.train) == sum(len(part.train) for part in parts)
    assert data.describe() == "\n".join(
        f"{share} of training from {part.describe()}" for share, part in zip(("75.0%", "25.0%"), parts, strict=True)
    )
    batch = next(train_batches(data, batch_size=40, seed=0))
    first = {window.tobytes() for window in all_windows(parts[0].train)}
    assert sum(window.tobytes() in first for window in batch) == 30


def test_damage_and_another_version_are_reported_not_repaired(config, path):
    run = changed(config, "data", path=path)
    shard, metadata = next(Path(path).glob("*train*")), Path(path, "metadata.json")
    whole = shard.read_bytes()
    damage_records(shard)
    data = open_data(run)
    with pytest.raises(DataError, match=f"^cannot read {path}: Corrupted "):
        next(train_batches(data, batch_size=len(data.train), seed=0))
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="prepared is damaged or cannot be read: "):
        open_data(run)
    content = metadata.read_text()
    metadata.write_text(content.replace(dataset.FORMAT, f"{dataset.WINDOWS} 1"))
    with pytest.raises(DataError, match=r"has format 'sparse_lm windows 1', not '.* 2': prepare"):
        open_data(run)
    metadata.unlink()
    metadata.symlink_to(metadata)
    with pytest.raises(DataError, match=r"prepared cannot be read: .*symbolic links"):
        open_data(run)
