"""The stages of a preparation: survey the text, train a tokenizer, turn text into tokens, and tokens into windows.

Every stage consists of tasks that work on their own part of the corpus, or shard of the result, so that the outcome
does not depend on how many processes there are.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from tokenizers import Tokenizer

from sparse_lm.data import packing
from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.corpus import Corpus, Document, TextFiles
from sparse_lm.data.holdout import Split, Survey, join_surveys, survey_corpus
from sparse_lm.data.workers import Report, Result
from sparse_lm.data.workspace import Workspace
from sparse_lm.files import replacing

REPORTED_TOKENS = 2**20  # at one time
TOKENIZER_SAMPLE = 512 * 2**20  # bytes of text that a tokenizer is trained on at most
WATCHED = 1000  # documents are reported at one time
SHARD_BYTES = 256 * 2**20
SHARD_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}"  # for TFDS to find the files by
COUNTS = ("documents", "tokens", "bytes")


def survey(corpus: Corpus, workspace: Workspace) -> Survey:
    """Reads a corpus as `survey_corpus` does, part by part."""
    tasks = workspace.tasks("survey", _survey, corpus)
    results = workspace.run("reading the text", "parts", tasks, len(tasks)).values()
    digests = (path.with_suffix(".digests").read_bytes() for path in tasks)
    return join_surveys([Survey(**result["survey"]) for result in results], digests)


def _survey(corpus: Corpus, path: Path, report: Report) -> Result:
    """Keeps the digests of the documents in a file: 32 bytes a document, in order."""
    with replacing(path.with_suffix(".digests")) as partial, open(partial, "wb") as file:
        found = survey_corpus(_watched(corpus, report), file.write)
    report({"parts": 1})
    return {"parts": 1, "survey": vars(found)}


def train_tokenizer(split: Split, vocab_size: int, workspace: Workspace) -> Tokenizer:
    """Trains a tokenizer on a sample of the training documents."""
    sample = workspace.tasks("sample", _sample, split.sample(TOKENIZER_SAMPLE))
    results = workspace.run("sampling text for the tokenizer", "parts", sample, len(sample)).values()
    texts = TextFiles(tuple(path.with_suffix(".jsonl") for path in sample))
    path = workspace.path("trained", split.sha256, vocab_size, *sample)
    task = {path: functools.partial(_train, texts, vocab_size)}
    workspace.run("training the tokenizer", "documents", task, sum(result["documents"] for result in results))
    return tokenizer_lib.load_tokenizer(path.with_suffix(".tokenizer"))


def _sample(corpus: Corpus, path: Path, report: Report) -> Result:
    documents = 0
    with replacing(path.with_suffix(".jsonl")) as partial, open(partial, "w") as file:
        for text in _watched(corpus, report):
            file.write(json.dumps({"text": text}) + "\n")
            documents += 1
    report({"parts": 1})
    return {"parts": 1, "documents": documents}


def _train(texts: TextFiles, vocab_size: int, path: Path, report: Report) -> Result:
    tokenizer = tokenizer_lib.train_tokenizer(_watched(texts, report), vocab_size)
    with replacing(path.with_suffix(".tokenizer")) as partial:
        tokenizer.save(str(partial))
    return {"documents": 0}


def _watched(documents: Iterable[Document], report: Report) -> Iterator[Document]:
    """Reports documents as they are read."""
    count = 0
    for document in documents:
        yield document
        count += 1
        if count == WATCHED:
            report({"documents": count})
            count = 0
    report({"documents": count})


def tokenise(split: Split, tokenizer: Tokenizer, workspace: Workspace) -> dict[str, dict[Path, Result]]:
    """Turns the documents of both parts, "train" and "heldout", into files of tokens.

    Returns:
      For each part its files, with the documents, tokens (ends of text among them) and bytes of text in each.
    """
    saved = workspace.path("tokenizer", tokenizer_lib.fingerprint(tokenizer))
    if not saved.exists():
        with replacing(saved) as partial:
            tokenizer.save(str(partial))
    tasks = {
        name: workspace.tasks("tokens", _tokenise, corpus, saved)
        for name, corpus in (("train", split.train), ("heldout", split.heldout))
    }
    results = workspace.run("tokenising", "documents", tasks["train"] | tasks["heldout"], split.documents)
    return {name: {path.with_suffix(".tokens"): results[path] for path in part} for name, part in tasks.items()}


def _tokenise(corpus: Corpus, tokenizer_path: Path, path: Path, report: Report) -> Result:
    """Writes a file of tokens, with an end of text behind every document."""
    tokenizer, lengths = _load(tokenizer_path)
    dtype, end_of_text = tokenizer_lib.token_dtype(len(lengths)), tokenizer_lib.end_of_text(tokenizer)
    counts, fresh = Counter(dict.fromkeys(COUNTS, 0)), Counter[str]()
    with replacing(path.with_suffix(".tokens")) as partial, open(partial, "wb") as file:
        for tokens in tokenizer_lib.tokenize(corpus, tokenizer):
            file.write(np.append(tokens, dtype.type(end_of_text)))
            size = int(lengths[tokens].sum(dtype=np.int64))
            fresh.update(documents=1, tokens=len(tokens) + 1, bytes=size)
            if fresh["tokens"] >= REPORTED_TOKENS:
                report(fresh)
                counts.update(fresh)
                fresh = Counter()
    report(fresh)
    counts.update(fresh)
    return counts


@functools.lru_cache(maxsize=1)
def _load(path: Path) -> tuple[Tokenizer, np.ndarray]:
    """Returns a tokenizer and the bytes of text that each of its tokens stands for."""
    tokenizer = tokenizer_lib.load_tokenizer(path)
    return tokenizer, tokenizer_lib.bytes_per_token(tokenizer)


def write(
    parts: dict[str, dict[Path, Result]], folder: Path, seq_len: int, dtype: np.dtype, workspace: Workspace
) -> dict[str, list[Result]]:
    """Cuts the tokens of each part into windows and writes them to ArrayRecord files in `folder`.

    Args:
      parts: what `tokenise` returns.
      folder: where the shards are, those of an earlier run among them.
      seq_len: targets of a window.
      dtype: of the tokens.
      workspace: for the results.

    Returns:
      For each part the windows and bytes of its shards.
    """
    results_folder = folder.with_suffix(".results")
    if not folder.exists():  # or an earlier run has moved it to its place, and was killed before it could say so
        shutil.rmtree(results_folder, ignore_errors=True)
    shard_windows = max(1, SHARD_BYTES // ((seq_len + 1) * dtype.itemsize))
    tasks: dict[str, dict[Path, Any]] = {}
    total = 0
    for name, files in parts.items():
        stream = packing.Stream([(path, counts["tokens"]) for path, counts in files.items() if counts["tokens"]])
        windows = packing.count_windows(len(stream), seq_len)
        total += windows
        tasks[name] = {}
        for number, first in enumerate(range(0, windows, shard_windows)):
            spans = stream.window_spans(first, min(first + shard_windows, windows), seq_len)
            shard = folder / f"packed_text-{name}.array_record-{number:05d}"  # as `SHARD_TEMPLATE` has it
            tasks[name][results_folder / f"{shard.name}.json"] = functools.partial(
                write_shard, spans, shard, seq_len, dtype
            )
    results = workspace.run("writing", "windows", tasks["train"] | tasks["heldout"], total)
    return {name: [results[path] for path in part] for name, part in tasks.items()}


def write_shard(
    spans: list[packing.Span], shard: Path, seq_len: int, dtype: np.dtype, path: Path, report: Report
) -> Result:
    """Writes the windows of some spans of tokens to one file; counts windows and the bytes of their records."""
    features = window_features(seq_len, dtype)
    counts = {"windows": 0, "bytes": 0}
    with replacing(shard) as partial:
        writer = array_record_module.ArrayRecordWriter(str(partial), "group_size:1")
        for windows in packing.cut((span.read(dtype) for span in spans), seq_len):
            for window in windows:
                record = features.serialize_example({"tokens": window})
                writer.write(record)
                counts["bytes"] += len(record)
            counts["windows"] += len(windows)
        writer.close()
    report({"windows": counts["windows"], "tokens": counts["windows"] * seq_len})
    return counts


def window_features(seq_len: int, dtype: np.dtype) -> tfds.features.FeaturesDict:
    """Describes a record to TFDS."""
    return tfds.features.FeaturesDict(
        {"tokens": tfds.features.Tensor(shape=(seq_len + 1,), dtype=dtype, encoding="bytes")}
    )
