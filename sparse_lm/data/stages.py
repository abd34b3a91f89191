"""The stages of a preparation: survey the text, train a tokenizer, turn text into tokens, and tokens into windows.

Every stage consists of tasks that work on their own part of the corpus, or shard of the result, so that the outcome
does not depend on how many processes there are. A task leaves a file in a folder, where a later run of the same
preparation finds it.
"""

from __future__ import annotations

import fileinput
import functools
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from tokenizers import Tokenizer

from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.corpus import Corpus
from sparse_lm.data.dataset import TOKENIZER_FILE
from sparse_lm.data.holdout import SURVEYED, Survey, sum_up, survey_documents
from sparse_lm.data.workers import Workers
from sparse_lm.files import replacing, write_json

_log = logging.getLogger(__name__)

TOKENIZER_SAMPLE = 512 * 2**20  # bytes of text that a tokenizer is trained on at most
SHARD_BYTES = 256 * 2**20
SHARD_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}"  # for TFDS to find the files by
COUNTS = ("documents", "tokens", "bytes")


def survey(corpus: Corpus, folder: Path, workers: Workers) -> Survey:
    """Reads a corpus part by part and sums it up."""
    paths = _run_on_parts("reading the text", _survey, corpus, folder, workers)
    return sum_up(np.fromfile(path, SURVEYED) for path in paths)


def _run_on_parts(
    what: str, function: Callable, corpus: Corpus, folder: Path, workers: Workers, *arguments: Any
) -> list[Path]:
    """Has `function(path, part, *arguments)` write a file for each part of a corpus, and returns these files."""
    tasks = {folder / f"{number:05d}": (part, *arguments) for number, part in enumerate(corpus.parts())}
    workers.run(what, function, tasks)
    return list(tasks)


def _survey(path: Path, corpus: Corpus) -> None:
    rows = survey_documents(corpus)
    with replacing(path) as partial:
        rows.tofile(partial)


def train_tokenizer(corpus: Corpus, vocab_size: int, folder: Path, workers: Workers) -> Tokenizer:
    """Trains a tokenizer on a corpus, such as a sample of the training documents."""
    sample = _run_on_parts("sampling text for the tokenizer", _sample, corpus, folder, workers)
    path = folder / TOKENIZER_FILE
    if not path.exists():
        _log.info("training the tokenizer")
        with fileinput.input(sample) as lines:
            tokenizer = tokenizer_lib.train_tokenizer(map(json.loads, lines), vocab_size)
        with replacing(path) as partial:
            tokenizer_lib.save_tokenizer(tokenizer, partial)
    return tokenizer_lib.load_tokenizer(path)


def _sample(path: Path, corpus: Corpus) -> None:
    with replacing(path) as partial, open(partial, "w") as file:
        file.writelines(json.dumps(text) + "\n" for text in corpus)


def tokenise(
    what: str, corpus: Corpus, tokenizer: Tokenizer, folder: Path, workers: Workers
) -> tuple[list[Path], dict[str, int]]:
    """Turns documents, `what` of the corpus, into files of tokens, with an end of text behind every document.

    Returns the files, and how many documents, tokens (ends of text among them) and bytes of text are in them.
    """
    paths = _run_on_parts(f"tokenising {what}", _tokenise, corpus, folder, workers, tokenizer.to_str())
    counts = [json.loads(path.read_text()) for path in paths]
    return [path.with_suffix(".tokens") for path in paths], {key: sum(part[key] for part in counts) for key in COUNTS}


def _tokenise(path: Path, corpus: Corpus, json_text: str) -> None:
    """Writes tokens beside `path`, which counts them."""
    tokenizer, lengths = _load(json_text)
    dtype, end_of_text = tokenizer_lib.token_dtype(len(lengths)), tokenizer_lib.end_of_text(tokenizer)
    counts = dict.fromkeys(COUNTS, 0)
    with replacing(path.with_suffix(".tokens")) as partial, open(partial, "wb") as file:
        for tokens in tokenizer_lib.tokenize(corpus, tokenizer):
            file.write(np.append(tokens, dtype.type(end_of_text)))
            counts["documents"] += 1
            counts["tokens"] += len(tokens) + 1
            counts["bytes"] += int(lengths[tokens].sum(dtype=np.int64))
    write_json(path, counts)


@functools.lru_cache(maxsize=1)
def _load(json_text: str) -> tuple[Tokenizer, np.ndarray]:
    """Returns a tokenizer and the bytes of text that each of its tokens stands for."""
    tokenizer = Tokenizer.from_str(json_text)
    return tokenizer, tokenizer_lib.bytes_per_token(tokenizer)


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
    """Cuts each split's files of tokens into windows and writes these, in ArrayRecord files, as a TFDS directory.

    Shards of an earlier run stay in the folder. `seq_len` and `vocab_size` are among the metadata.
    """
    seq_len, dtype = metadata["seq_len"], tokenizer_lib.token_dtype(metadata["vocab_size"])
    features = window_features(seq_len, dtype)
    template = tfds.core.ShardedFileTemplate(folder, SHARD_TEMPLATE)
    record_bytes = len(features.serialize_example({"tokens": np.zeros(seq_len + 1, dtype)}))
    most = max(1, SHARD_BYTES // ((seq_len + 1) * dtype.itemsize))
    tasks, splits = {}, []
    for name, paths in files.items():
        stream = Stream(paths, dtype)
        windows = -(-len(stream) // seq_len)
        ranges = [(first, min(first + most, windows)) for first in range(0, windows, most)]
        for number, (first, last) in enumerate(ranges):
            shard = folder / f"packed_text-{name}.array_record-{number:05d}"  # as `SHARD_TEMPLATE` has it
            tasks[shard] = (stream, first, last, seq_len, dtype)
        lengths = [last - first for first, last in ranges]
        splits.append(tfds.core.SplitInfo(name, lengths, windows * record_bytes, template))
    workers.run("writing", write_shard, tasks)
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
    with replacing(path) as partial:
        try:
            writer = array_record_module.ArrayRecordWriter(str(partial), "group_size:1")
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
