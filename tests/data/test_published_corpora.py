"""C4 and DCLM as they are published, with a tokenizer of Llama 3's shape, from small files in the same formats."""

import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

from sparse_lm.data import tfds_corpus
from sparse_lm.data.errors import DataError
from sparse_lm.prepare_data import prepare_files
from tests.data.examples import (
    as_tfrecords,
    make_documents,
    make_llama3_tokenizer,
    make_tokenizer,
    stream_of,
    targets_of,
    write_c4,
    write_tfds,
)

DOCUMENTS = make_documents(90)
TRAIN, VALIDATION = DOCUMENTS[:70], DOCUMENTS[70:]
C4_FEATURES = {name: tfds.features.Text() for name in ("content-length", "content-type", "text", "timestamp", "url")}


def targets(windows) -> np.ndarray:
    return targets_of(windows.read(np.arange(len(windows))))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    make_tokenizer().save(str(path))
    return str(path)


@pytest.mark.long
def test_c4_files_with_their_own_validation_and_llama3s_tokenizer(tmp_path):
    llama3 = make_llama3_tokenizer()
    llama3.save(str(tmp_path / "tokenizer.json"))
    train = [*TRAIN, "The year 2024: it's\r\n  <|end_of_text|> naïve 漢字"]
    write_c4(tmp_path / "c4-train.00000-of-01024.json.gz", train[:30])
    write_c4(tmp_path / "c4-train.00001-of-01024.json.gz", train[30:])
    write_c4(tmp_path / "c4-validation.00000-of-00008.json.gz", VALIDATION)
    data = prepare_files(
        [f"{tmp_path}/c4-train.*.json.gz"],
        tmp_path / "out",
        heldout_files=[f"{tmp_path}/c4-validation.*.json.gz"],
        tokenizer=str(tmp_path / "tokenizer.json"),
        seq_len=32,
    )
    assert data.vocab_size == len(data.bytes_per_token) == 66_256
    record = tfds.builder_from_directory(tmp_path / "out").as_data_source("train")[0]["tokens"]
    assert record.dtype == np.uint32
    np.testing.assert_array_equal(record, data.train[0])
    assert "tensorflow" not in sys.modules
    llama3.encode_special_tokens = True  # which a document's text spells: text like any other
    for name, documents in (("train", train), ("heldout", VALIDATION)):
        ids = [llama3.encode(text, add_special_tokens=False).ids for text in documents]
        assert max(map(max, ids)) < 66_000
        stream = np.concatenate([[*tokens, 66_001] for tokens in ids])
        np.testing.assert_array_equal(targets(getattr(data, name))[: len(stream)], stream)
        counts = data.info["splits"][name]
        assert counts == {
            "documents": len(documents),
            "tokens": len(stream),
            "bytes": sum(len(text.encode()) for text in documents),
        }


@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
def test_a_tfds_directory_of_c4(tmp_path, tokenizer, file_format):
    rows = [dict.fromkeys(C4_FEATURES, "x") | {"text": text} for text in DOCUMENTS]
    directory = write_tfds(tmp_path, C4_FEATURES, shards=4, train=rows[:70], validation=rows[70:])
    if file_format == "tfrecord":
        as_tfrecords(directory)
    assert [len(corpus.parts()) for corpus in tfds_corpus.open_splits(directory)] == [4, 4]
    data = prepare_files([], tmp_path / "out", tfds=str(directory), tokenizer=tokenizer, seq_len=32)
    for windows, documents in ((data.train, TRAIN), (data.heldout, VALIDATION)):
        stream = stream_of(documents, make_tokenizer())
        np.testing.assert_array_equal(targets(windows)[: len(stream)], stream)


def test_a_tfrecord_file_that_is_cut_off_is_refused_wherever_it_is_cut(tmp_path):
    directory = write_tfds(tmp_path, {"text": tfds.features.Text()}, shards=2, train=[{"text": "x" * 9}] * 4)
    as_tfrecords(directory)
    train, _ = tfds_corpus.open_splits(directory)
    shard = sorted(directory.glob("*tfrecord*"))[1]
    whole = shard.read_bytes()
    far = (2**62).to_bytes(8, "little")  # a length that no file has
    damaged = {whole[:size]: "is cut off or damaged: [01] of its 2 records are whole" for size in range(len(whole))}
    damaged[far + whole[8:]] = "is cut off or damaged: 0 of its 2"
    damaged[whole * 2] = f"is damaged: {len(whole)} bytes follow"
    for content, message in damaged.items():
        shard.write_bytes(content)
        with pytest.raises(DataError, match=rf"{shard.name} {message}"):
            list(train)


def test_token_documents_come_in_parts_and_other_features_are_refused(tmp_path):
    rows = [{"tokens": np.arange(length, dtype=np.int64)} for length in (5, 0, 7, 3, 9, 1)]
    ragged = {"tokens": tfds.features.Tensor(shape=(None,), dtype=np.int64)}
    train, _ = tfds_corpus.open_splits(write_tfds(tmp_path / "ragged", ragged, shards=3, train=rows), end_of_text=8)
    assert [len(tokens) for part in train.parts() for tokens in part] == [5, 7, 3, 8, 1]
    assert len(train.parts()) == 3
    fixed = {"tokens": tfds.features.Tensor(shape=(4,), dtype=np.int64)}
    windows = write_tfds(tmp_path / "windows", fixed, train=[{"tokens": np.arange(4)}])
    with pytest.raises(DataError, match=r"tokens must be 1-D integers of any length, not \(4,\) int64"):
        tfds_corpus.open_splits(windows)
    images = write_tfds(tmp_path / "images", {"image": np.int32}, train=[{"image": 1}])
    with pytest.raises(DataError, match=r"no feature tokens or text, but image"):
        tfds_corpus.open_splits(images)


def test_a_file_is_not_both_read_and_held_out_however_its_path_is_spelled(tmp_path, monkeypatch):
    write_c4(tmp_path / "train.json.gz", TRAIN)
    write_c4(tmp_path / "val.json.gz", VALIDATION)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "b.json.gz").symlink_to(tmp_path / "val.json.gz")
    monkeypatch.chdir(tmp_path)
    for heldout in (f"{tmp_path}/val.json.gz", "link/../val.json.gz", "link/*"):
        with pytest.raises(DataError, match=r"(val|b)\.json\.gz is among --files and among --heldout_files"):
            prepare_files(["*.gz"], tmp_path / "out", heldout_files=[heldout], seq_len=8)
