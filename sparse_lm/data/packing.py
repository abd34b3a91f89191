"""Packs files of tokens into windows, and writes these as a TFDS directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module

from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.workers import Workers

SHARD_BYTES = 256 * 2**20
SHARD_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}"  # for TFDS to find the files by


def window(stream: np.ndarray, number: int, seq_len: int) -> np.ndarray:
    """Returns tokens number * seq_len - 1 to (number + 1) * seq_len - 1, both included, of a stream that goes round.

    After the last token comes the first. As a model reads a window as inputs w[:-1] and targets w[1:], every token is a
    target exactly once, the first one predicted from the end of text that closes the stream; what the last window lacks
    is filled up from the start.
    """
    return stream.take(np.arange(number * seq_len - 1, (number + 1) * seq_len), mode="wrap")


def write(files: dict[str, Path], folder: Path, metadata: dict[str, Any], workers: Workers) -> None:
    """Cuts each split's file of tokens into windows and writes these, in ArrayRecord files, to a folder it makes.

    `seq_len` and `vocab_size` are among the metadata.
    """
    seq_len, dtype = metadata["seq_len"], tokenizer_lib.token_dtype(metadata["vocab_size"])
    features = window_features(seq_len, dtype)
    template = tfds.core.ShardedFileTemplate(folder, SHARD_TEMPLATE)
    record_bytes = len(features.serialize_example({"tokens": np.zeros(seq_len + 1, dtype)}))
    most = max(1, SHARD_BYTES // ((seq_len + 1) * dtype.itemsize))
    tasks, splits = [], []
    for name, tokens in files.items():
        count = -(-tokens.stat().st_size // (dtype.itemsize * seq_len))
        shards = [range(count)[first : first + most] for first in range(0, count, most)]
        for number, numbers in enumerate(shards):
            path = folder / f"packed_text-{name}.array_record-{number:05d}"  # as `SHARD_TEMPLATE` has it
            tasks.append((path, tokens, numbers, seq_len, dtype))
        splits.append(tfds.core.SplitInfo(name, list(map(len, shards)), count * record_bytes, template))
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


def write_shard(path: Path, tokens: Path, numbers: range, seq_len: int, dtype: np.dtype) -> None:
    """Writes windows of a file of tokens to one file."""
    features, stream = window_features(seq_len, dtype), np.memmap(tokens, dtype, "r")
    try:
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        for number in numbers:
            writer.write(features.serialize_example({"tokens": window(stream, number, seq_len)}))
        writer.close()
    except RuntimeError as error:  # its error for a full disk, too
        raise OSError(str(error)) from error


def window_features(seq_len: int, dtype: np.dtype) -> tfds.features.FeaturesDict:
    """Describes a record to TFDS."""
    return tfds.features.FeaturesDict(
        {"tokens": tfds.features.Tensor(shape=(seq_len + 1,), dtype=dtype, encoding="bytes")}
    )
