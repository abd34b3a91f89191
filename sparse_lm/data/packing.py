"""Packs files of tokens into windows, and writes these as a TFDS directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module

from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.workers import Workers

SHARD_BYTES = 256 * 2**20
SHARD_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}"  # for TFDS to find the files by


class Stream:
    """Packs the tokens in files into windows of one length, with no token lost or repeated.

    The tokens form one stream that goes round: after the last one comes the first. Window w is the tokens from
    w * seq_len - 1 to (w + 1) * seq_len - 1, both included. As a model reads a window as inputs w[:-1] and targets
    w[1:], every token is a target exactly once, the first one predicted from the end of text that closes the stream;
    what the last window lacks is filled up from the start.
    """

    def __init__(self, paths: Sequence[Path], dtype: np.dtype):
        self._paths, self._dtype = paths, np.dtype(dtype)
        self._ends = np.cumsum([path.stat().st_size // self._dtype.itemsize for path in paths], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def windows(self, first: int, last: int, seq_len: int) -> np.ndarray:
        """Reads the windows from `first` to before `last`, as a view [last - first, seq_len + 1]."""
        tokens = self._read(first * seq_len - 1, last * seq_len)
        return np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)[::seq_len]

    def _read(self, start: int, stop: int) -> np.ndarray:
        pieces = []
        while start < stop:
            position = start % len(self)
            index = int(np.searchsorted(self._ends, position, side="right"))
            offset = position - int(self._ends[index - 1] if index else 0)
            count = min(stop - start, int(self._ends[index]) - position)
            pieces.append(np.fromfile(self._paths[index], self._dtype, count, offset=offset * self._dtype.itemsize))
            start += count
        return np.concatenate(pieces)


def write(files: dict[str, list[Path]], folder: Path, metadata: dict[str, Any], workers: Workers) -> None:
    """Cuts each split's files of tokens into windows and writes these, in ArrayRecord files, to a folder it makes.

    `seq_len` and `vocab_size` are among the metadata.
    """
    seq_len, dtype = metadata["seq_len"], tokenizer_lib.token_dtype(metadata["vocab_size"])
    features = window_features(seq_len, dtype)
    template = tfds.core.ShardedFileTemplate(folder, SHARD_TEMPLATE)
    record_bytes = len(features.serialize_example({"tokens": np.zeros(seq_len + 1, dtype)}))
    most = max(1, SHARD_BYTES // ((seq_len + 1) * dtype.itemsize))
    tasks, splits = [], []
    for name, paths in files.items():
        stream = Stream(paths, dtype)
        windows = -(-len(stream) // seq_len)
        ranges = [(first, min(first + most, windows)) for first in range(0, windows, most)]
        for number, (first, last) in enumerate(ranges):
            shard = folder / f"packed_text-{name}.array_record-{number:05d}"  # as `SHARD_TEMPLATE` has it
            tasks.append((shard, stream, first, last, seq_len, dtype))
        lengths = [last - first for first, last in ranges]
        splits.append(tfds.core.SplitInfo(name, lengths, windows * record_bytes, template))
    folder.mkdir()
    list(workers.map("writing", write_shard, tasks))
    tfds.folder_dataset.write_metadata(
        data_dir=folder,
        features=features,
        split_infos=splits,
        filename_template=template,
        check_data=False,  # by TensorFlow
        description="Documents joined by an end-of-text token, cut into windows that overlap by one token.",
        disable_shuffling=True,
        metadata=tfds.core.MetadataDict(metadata),
    )


def write_shard(path: Path, stream: Stream, first: int, last: int, seq_len: int, dtype: np.dtype) -> None:
    """Writes the windows of a stream from `first` to before `last` to one file."""
    features = window_features(seq_len, dtype)
    try:
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        for window in stream.windows(first, last, seq_len):
            writer.write(features.serialize_example({"tokens": window}))
        writer.close()
    except RuntimeError as error:  # its error for a full disk, too
        raise OSError(str(error)) from error


def window_features(seq_len: int, dtype: np.dtype) -> tfds.features.FeaturesDict:
    """Describes a record to TFDS."""
    return tfds.features.FeaturesDict(
        {"tokens": tfds.features.Tensor(shape=(seq_len + 1,), dtype=dtype, encoding="bytes")}
    )
