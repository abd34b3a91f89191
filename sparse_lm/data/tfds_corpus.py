"""Reads the documents of any TFDS directory, prepared by whatever program, such as C4 or DCLM.

ArrayRecord and TFRecord files, which most published directories hold, are read without TensorFlow, in order.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds
from array_record.python.array_record_data_source import ArrayRecordDataSource

from sparse_lm.errors import DataError

INFO_FILE = "dataset_info.json"
FEATURE = "text"  # what is read of a record
HELDOUT_SPLITS = ("heldout", "validation", "test")  # the first one that a dataset has
READ_RECORDS = 256  # fetched at one time


@dataclasses.dataclass(frozen=True)
class TfdsCorpus:
    """Reads a split of a TFDS directory, a document a record."""

    file_format: str
    shards: tuple[tuple[Path, int], ...]  # files, each with the number of its records

    def __iter__(self) -> Iterator[str]:
        """Yields non-empty documents in stored order; raises DataError if a file is cut off or cannot be parsed."""
        features = tfds.features.FeaturesDict({FEATURE: tfds.features.Text()})
        for path, length in self.shards:
            try:
                for record in _READERS[self.file_format](path, length):
                    document = features.deserialize_example_np(record)[FEATURE]
                    if document is None:
                        raise ValueError(f"a record without {FEATURE}")
                    if document:
                        yield document.decode("utf-8", "replace")
            except Exception as error:  # what damage leads to, in the words of several libraries
                raise DataError(f"cannot read {path}: {error}") from error

    def parts(self) -> list[TfdsCorpus]:
        """Returns a file each."""
        return [dataclasses.replace(self, shards=(shard,)) for shard in self.shards if shard[1]]


def open_splits(directory: Path) -> tuple[TfdsCorpus, TfdsCorpus | None]:
    """Returns the training documents, and the held-out ones if the dataset has a split for them.

    Raises:
      DataError: there is no dataset, or it has no train split, no text, or files that only TensorFlow reads.
    """
    if not (directory / INFO_FILE).is_file():
        raise DataError(f"no TFDS dataset in {directory}: there is no {INFO_FILE} in it")
    try:
        info = tfds.builder_from_directory(directory).info
    except Exception as error:  # anything from a missing file to malformed JSON, in the words of several libraries
        raise DataError(f"cannot read {directory} as a TFDS dataset: {error}") from error
    if "train" not in info.splits:
        raise DataError(f"{directory} has no split 'train', but {', '.join(info.splits) or 'none'}")
    if FEATURE not in info.features:
        raise DataError(f"{directory} has no feature {FEATURE!r}, a string a record, but {', '.join(info.features)}")
    shape, dtype = info.features[FEATURE].shape, np.dtype(info.features[FEATURE].np_dtype)
    if shape != () or dtype.kind != "O":  # as which TFDS has strings
        raise DataError(f"{directory}: the feature {FEATURE!r} must be a string a record, not {dtype} {list(shape)}")
    file_format = info.file_format.value
    if file_format not in _READERS:
        raise DataError(f"{directory} holds {file_format} files; readable: {', '.join(_READERS)}")

    def corpus(name: str) -> TfdsCorpus:
        split = info.splits[name]
        return TfdsCorpus(file_format, tuple(zip(map(Path, split.filepaths), split.shard_lengths, strict=True)))

    heldout = next((name for name in HELDOUT_SPLITS if name in info.splits), None)
    return corpus("train"), heldout and corpus(heldout)


def _array_records(path: Path, count: int) -> Iterator[bytes]:
    source = ArrayRecordDataSource(str(path))
    for start in range(0, count, READ_RECORDS):
        yield from source.__getitems__(range(start, min(start + READ_RECORDS, count)))


def _tfrecords(path: Path, count: int) -> Iterator[bytes]:
    """Reads a TFRecord file, whose records have a length and a checksum in front, another checksum behind, unread."""
    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size
        for number in range(count):
            length = int.from_bytes(file.read(12)[:8], "little")
            left -= 12 + length + 4
            if left < 0:
                raise ValueError(f"it is cut off or damaged: {number} of its {count} records are whole")
            yield file.read(length + 4)[:-4]
    if left:
        raise ValueError(f"it is damaged: {left} bytes follow the {count} records that {INFO_FILE} tells of")


_READERS = {"tfrecord": _tfrecords, "array_record": _array_records}
