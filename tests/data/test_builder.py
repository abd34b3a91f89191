import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from sparse_lm.data import builder, tokenizer
from sparse_lm.data.dataset import open_prepared
from sparse_lm.data.holdout import hold_out
from tests.data.examples import Documents, make_documents, make_tokenizer, stream_of

SEQ_LEN = 32
TOKENIZER = make_tokenizer()
DOCUMENTS = Documents(make_documents(120))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("data") / "prepared"
    builder.prepare(directory, DOCUMENTS, seq_len=SEQ_LEN, tokenizer=TOKENIZER, source={"from": "a test"})
    return directory


def windows_of(directory: Path, split: str) -> np.ndarray:
    windows = getattr(open_prepared(directory), split)
    return windows.read(np.arange(len(windows)))


def test_the_metadata_says_what_was_prepared(prepared):
    data = open_prepared(prepared)
    split = hold_out(DOCUMENTS)
    assert data.info["corpus_sha256"] == split.sha256
    assert data.info["source"] == {"from": "a test"}
    assert data.vocab_size == len(data.bytes_per_token) == tokenizer.vocabulary_size(TOKENIZER)
    assert data.seq_len == SEQ_LEN
    for part in ("train", "heldout"):
        texts = list(getattr(split, part))
        assert data.info["splits"][part] == {
            "documents": len(texts),
            "tokens": len(stream_of(texts, TOKENIZER)),
            "bytes": sum(len(text.encode()) for text in texts),
        }
    assert f"{len(DOCUMENTS)} documents" in data.describe()


def test_plain_tfds_reads_it_without_tensorflow(prepared):
    reader = tfds.builder_from_directory(prepared)
    assert reader.info.file_format.value == "array_record"
    record = reader.as_data_source("train")[0]["tokens"]
    assert record.dtype == np.uint16
    np.testing.assert_array_equal(record, windows_of(prepared, "train")[0])
    assert "tensorflow" not in sys.modules
