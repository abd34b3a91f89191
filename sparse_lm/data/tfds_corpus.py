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

from sparse_lm.data.corpus import Document
from sparse_lm.data.errors import DataError

INFO_FILE = "dataset_info.json"
FEATURES = ("tokens", "text")  # the first one that a dataset has is read
HELDOUT_SPLITS = ("heldout", "validation", "test")  # the first one that a dataset has
READ_RECORDS = 256  # fetched at one time


def find_dataset(path: str | Path) -> Path:
    """Returns the TFDS directory at `path`, or the only one below it (as in c4/en/3.1.0).

    Raises:
      DataError: there is none, or several.
    """
    path = Path(path)
    if (path / INFO_FILE).is_file():
        return path
    if not path.is_dir():
        raise DataError(f"no directory {path}")
    # Both TFDS and `prepare` build in folders of this name; one may be left of a build that was killed.
    found = sorted(info.parent for info in path.rglob(INFO_FILE) if "incomplete" not in str(info.relative_to(path)))
    if not found:
        raise DataError(f"no TFDS dataset in {path}: there is no {INFO_FILE} in or below it")
    if len(found) > 1:
        raise DataError(f"several TFDS datasets below {path}: name one of {', '.join(map(str, found))}")
    return found[0]


def open_splits(directory: Path, end_of_text: int | None = None) -> tuple[TfdsCorpus, TfdsCorpus | None]:
    """Returns the training documents, and the held-out ones if the dataset has a split for them.

    Raises:
      DataError: the dataset has no train split.
    """
    names = _info(directory).splits
    if "train" not in names:
        raise DataError(f"{directory} has no split 'train', but {', '.join(names) or 'none'}")
    heldout = next((name for name in HELDOUT_SPLITS if name in names), None)
    return TfdsCorpus(directory, "train", end_of_text), heldout and TfdsCorpus(directory, heldout, end_of_text)


@dataclasses.dataclass(frozen=True)
class TfdsCorpus:
    """Reads one split of a TFDS directory, or one file of a split, a document (`tokens` or `text`) a record.

    Tokenised documents may end with `end_of_text` or not.
    """

    directory: Path
    split: str
    end_of_text: int | None = None  # of token data
    shard: int | None = None  # one file of the split; None for all

    @property
    def feature(self) -> str:
        """Tells which feature is read: "tokens" or "text".

        Raises:
          DataError: the dataset has neither.
        """
        features = _info(self.directory).features
        for name in FEATURES:
            if name in features:
                return name
        raise DataError(f"{self.directory} has no feature {' or '.join(FEATURES)}, but {', '.join(features)}")

    def __iter__(self) -> Iterator[Document]:
        """Yields non-empty documents in stored order.

        Raises:
          DataError: the files are damaged, of a format that only TensorFlow reads, or hold something else.
        """
        try:
            yield from filter(len, self._texts() if self.feature == "text" else self._token_documents())
        except (OSError, RuntimeError) as error:  # the latter: damaged ArrayRecord files
            raise DataError(f"cannot read {self.directory}: {error}") from error

    def parts(self) -> list[TfdsCorpus]:
        """Returns a file each."""
        if self.shard is not None:
            return [self]
        return [
            dataclasses.replace(self, shard=shard) for shard, (_, length) in enumerate(self._shards()) if length
        ] or [self]

    def files(self) -> list[Path]:
        return [self.directory / INFO_FILE, *(path for path, _ in self._shards())]

    def _shards(self) -> list[tuple[Path, int]]:
        """Returns the files, each with the number of its records."""
        split = _info(self.directory).splits[self.split]
        shards = list(zip(map(Path, split.filepaths), split.shard_lengths, strict=True))
        return shards if self.shard is None else [shards[self.shard]]

    def _connector(self) -> tfds.features.FeatureConnector:
        return _info(self.directory).features[self.feature]

    def _texts(self) -> Iterator[str]:
        for value in self._values():
            yield value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

    def _token_documents(self) -> Iterator[np.ndarray]:
        shape, dtype = self._connector().shape, np.dtype(self._connector().np_dtype)
        if shape != (None,) or not np.issubdtype(dtype, np.integer):  # of one length: windows, that documents run over
            raise DataError(f"{self.directory}: tokens must be 1-D integers of any length, not {shape} {dtype}")
        rows = map(np.asarray, self._values())
        return (row[:-1] if len(row) and row[-1] == self.end_of_text else row for row in rows)

    def _values(self) -> Iterator[bytes | np.ndarray]:
        name = self.feature
        wanted = tfds.features.FeaturesDict({name: self._connector()})
        for record in self._records():
            try:
                value = wanted.deserialize_example_np(record)[name]
            except Exception as error:  # what damage leads to, in the words of several libraries
                raise DataError(f"cannot read {self.directory}: a damaged record: {error}") from error
            if value is None:
                raise DataError(f"cannot read {self.directory}: a record without {name}")
            yield value

    def _records(self) -> Iterator[bytes]:
        file_format = _info(self.directory).file_format.value
        readers = {"tfrecord": _tfrecords, "array_record": _array_records}
        if file_format not in readers:
            raise DataError(f"{self.directory} holds {file_format} files; readable: array_record, tfrecord")
        for path, length in self._shards():
            yield from readers[file_format](path, length)


def _info(directory: Path) -> tfds.core.DatasetInfo:
    try:
        return tfds.builder_from_directory(directory).info
    except Exception as error:  # anything from a missing file to malformed JSON, in the words of several libraries
        raise DataError(f"cannot read {directory} as a TFDS dataset: {error}") from error


def _array_records(path: Path, count: int) -> Iterator[bytes]:
    source = ArrayRecordDataSource(str(path))
    if len(source) != count:
        raise DataError(f"{path} is damaged: it has {len(source)} records, {INFO_FILE} tells of {count}")
    for start in range(0, count, READ_RECORDS):
        yield from source.__getitems__(range(start, min(start + READ_RECORDS, count)))


def _tfrecords(path: Path, count: int) -> Iterator[bytes]:
    """Reads a TFRecord file: each record has its length and a checksum in front, another checksum behind.

    Raises:
      DataError: there are not `count` records, or not all are whole.
    """
    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size
        for number in range(count):
            length = int.from_bytes(file.read(12)[:8], "little")
            left -= 12 + length + 4
            if left < 0:
                raise DataError(f"{path} is cut off or damaged: {number} of its {count} records are whole")
            yield file.read(length + 4)[:-4]
    if left:
        raise DataError(f"{path} is damaged: {left} bytes follow the {count} records that {INFO_FILE} tells of")
