"""The stages of a preparation: survey the text, train a tokenizer, turn text into tokens, and tokens into windows.

Every stage consists of tasks that work on their own part of the corpus, or shard of the result, so that the outcome
does not depend on how many processes there are. A task leaves a file in a folder, where a later run of the same
preparation finds it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from tokenizers import Tokenizer

from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.corpus import Corpus, TextFiles
from sparse_lm.data.holdout import SURVEYED, Split, Survey, sum_up, survey_documents
from sparse_lm.data.packing import Stream
from sparse_lm.data.workers import Workers
from sparse_lm.files import replacing, write_json

TOKENIZER_SAMPLE = 512 * 2**20  # bytes of text that a tokenizer is trained on at most
SHARD_BYTES = 256 * 2**20
SHARD_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}"  # for TFDS to find the files by
COUNTS = ("documents", "tokens", "bytes")


def survey(corpus: Corpus, folder: Path, workers: Workers) -> Survey:
    """Reads a corpus as `survey_corpus` does, part by part."""
    tasks = {folder / f"{number:05d}": (part,) for number, part in enumerate(corpus.parts())}
    workers.run("reading the text", _survey, tasks)
    return sum_up(np.fromfile(path, SURVEYED) for path in tasks)


def _survey(path: Path, corpus: Corpus) -> None:
    rows = survey_documents(corpus)
    with replacing(path) as partial:
        rows.tofile(partial)


def train_tokenizer(split: Split, vocab_size: int, folder: Path, workers: Workers) -> Tokenizer:
    """Trains a tokenizer on a sample of the training documents."""
    parts = split.sample(TOKENIZER_SAMPLE).parts()
    sample = {folder / f"{number:05d}.jsonl": (part,) for number, part in enumerate(parts)}
    workers.run("sampling text for the tokenizer", _sample, sample)
    path = folder / "tokenizer.json"
    workers.run("training the tokenizer", _train, {path: (TextFiles(tuple(sample)), vocab_size)})
    return tokenizer_lib.load_tokenizer(path)


def _sample(path: Path, corpus: Corpus) -> None:
    with replacing(path) as partial, open(partial, "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in corpus)


def _train(path: Path, texts: TextFiles, vocab_size: int) -> None:
    tokenizer = tokenizer_lib.train_tokenizer(texts, vocab_size)
    with replacing(path) as partial:
        tokenizer.save(str(partial))


def tokenise(corpora: dict[str, Corpus], tokenizer: Tokenizer, folder: Path, workers: Workers) -> dict[str, list[Path]]:
    """Turns the documents of each corpus into files of tokens, with an end of text behind every document.

    Returns:
      For each corpus its files, beside each of which a .json file counts documents, tokens (ends of text among them)
      and bytes of text.
    """
    saved = folder / f"{tokenizer_lib.fingerprint(tokenizer)}.json"
    if not saved.exists():
        with replacing(saved) as partial:
            tokenizer.save(str(partial))
    tasks = {
        name: {folder / f"{name}-{number:05d}.json": (part, saved) for number, part in enumerate(corpus.parts())}
        for name, corpus in corpora.items()
    }
    workers.run("tokenising", _tokenise, {path: task for part in tasks.values() for path, task in part.items()})
    return {name: [path.with_suffix(".tokens") for path in part] for name, part in tasks.items()}


def _tokenise(path: Path, corpus: Corpus, tokenizer_path: Path) -> None:
    tokenizer, lengths = _load(tokenizer_path)
    dtype, end_of_text = tokenizer_lib.token_dtype(len(lengths)), tokenizer_lib.end_of_text(tokenizer)
    counts = dict.fromkeys(COUNTS, 0)
    with replacing(path.with_suffix(".tokens")) as partial, open(partial, "wb") as file:
        for tokens in tokenizer_lib.tokenize(corpus, tokenizer):
            file.write(np.append(tokens, dtype.type(end_of_text)))
            counts["documents"] += 1
            counts["tokens"] += len(tokens) + 1
            counts["bytes"] += int(lengths[tokens].sum(dtype=np.int64))
    write_json(path, counts)


def count(files: list[Path]) -> dict[str, int]:
    """Sums up what `tokenise` has counted in the files of a corpus."""
    counts = [json.loads(path.with_suffix(".json").read_text()) for path in files]
    return {key: sum(part[key] for part in counts) for key in COUNTS}


@functools.lru_cache(maxsize=1)
def _load(path: Path) -> tuple[Tokenizer, np.ndarray]:
    """Returns a tokenizer and the bytes of text that each of its tokens stands for."""
    tokenizer = tokenizer_lib.load_tokenizer(path)
    return tokenizer, tokenizer_lib.bytes_per_token(tokenizer)


def write(
    files: dict[str, list[Path]], folder: Path, seq_len: int, dtype: np.dtype, workers: Workers
) -> list[tfds.core.SplitInfo]:
    """Cuts tokens into windows and writes them to ArrayRecord files.

    Args:
      files: what `tokenise` returns.
      folder: where the shards are, those of an earlier run among them.
      seq_len: targets of a window.
      dtype: of the tokens.
      workers: run the tasks.

    Returns:
      What TFDS has to know about each split.
    """
    template = tfds.core.ShardedFileTemplate(folder, SHARD_TEMPLATE)
    record_bytes = len(window_features(seq_len, dtype).serialize_example({"tokens": np.zeros(seq_len + 1, dtype)}))
    most = max(1, SHARD_BYTES // ((seq_len + 1) * dtype.itemsize))
    tasks, splits = {}, []
    for name, paths in files.items():
        stream = Stream(paths, dtype)
        windows = stream.count_windows(seq_len)
        firsts = range(0, windows, most)
        for number, first in enumerate(firsts):
            shard = folder / f"packed_text-{name}.array_record-{number:05d}"  # as `SHARD_TEMPLATE` has it
            tasks[shard] = (stream, first, min(first + most, windows), seq_len, dtype)
        lengths = [min(most, windows - first) for first in firsts]
        splits.append(
            tfds.core.SplitInfo(
                name=name, shard_lengths=lengths, num_bytes=windows * record_bytes, filename_template=template
            )
        )
    workers.run("writing", write_shard, tasks)
    return splits


def write_shard(path: Path, stream: Stream, first: int, last: int, seq_len: int, dtype: np.dtype) -> None:
    """Writes the windows of a stream from `first` to before `last` to one file."""
    features = window_features(seq_len, dtype)
    with replacing(path) as partial:
        writer = array_record_module.ArrayRecordWriter(str(partial), "group_size:1")
        for window in stream.windows(first, last, seq_len):
            writer.write(features.serialize_example({"tokens": window}))
        writer.close()


def window_features(seq_len: int, dtype: np.dtype) -> tfds.features.FeaturesDict:
    """Describes a record to TFDS."""
    return tfds.features.FeaturesDict(
        {"tokens": tfds.features.Tensor(shape=(seq_len + 1,), dtype=dtype, encoding="bytes")}
    )
