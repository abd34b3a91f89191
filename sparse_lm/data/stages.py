"""The stages of a preparation, as tasks that several processes run: survey, sample, tokenise, write.

    survey      reads every part of a corpus once: how much there is, and what must be held out
    sample      copies documents to train a tokenizer on
    tokenise    part by part, into files of tokens
    write       windows of those tokens, shard by shard

Every task works on its own part or shard, so that the outcome does not depend on how many processes
there are. Results are small; text and tokens are in files beside them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from tokenizers import Tokenizer

from sparse_lm.data import packing
from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.corpus import Corpus, TextFiles
from sparse_lm.data.holdout import Split, Survey, measure
from sparse_lm.data.packing import Span
from sparse_lm.data.tasks import Report, replacing, save_json
from sparse_lm.data.workspace import Workspace

SEGMENT_TOKENS = 8 * 2**20  # after which a task saves what it has, so that a kill loses no more of a large file
SAMPLE_FIELD = "text"
DATASET = "packed_text"
SHARD_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}"  # for TFDS to find the files by


@dataclasses.dataclass(frozen=True)
class SurveyTask:
    """Measures a corpus and keeps the digests of its documents."""

    path: Path
    corpus: Corpus

    @property
    def digests(self) -> Path:
        """32 bytes a document, in order."""
        return self.path.with_suffix(".digests")

    def run(self, report: Report) -> dict[str, Any]:
        with replacing(self.digests) as partial, open(partial, "wb") as file:
            figures = measure(self.corpus, file.write)
        report({"parts": 1})
        return {"parts": 1, **figures}


def survey(corpus: Corpus, workspace: Workspace) -> Survey:
    """What `holdout.survey_corpus` finds, part by part, once for all runs."""
    path = workspace.path("surveyed", corpus.stamp())
    if not path.exists():
        parts = corpus.parts()
        tasks = [SurveyTask(workspace.path("survey", part.stamp()), part) for part in parts]
        figures = workspace.run("reading the text", tasks, "parts", len(tasks))
        digest = hashlib.sha256()
        for task in tasks:
            digest.update(task.digests.read_bytes())
        found = Survey(
            documents=sum(part["documents"] for part in figures),
            size=sum(part["size"] for part in figures),
            lowest=min(part["lowest"] for part in figures),
            highest=max(part["highest"] for part in figures),
            sha256=digest.hexdigest(),
        )
        save_json(path, dataclasses.asdict(found))
        workspace.forget("survey")
    return Survey(**json.loads(path.read_text()))


@dataclasses.dataclass(frozen=True)
class SampleTask:
    """Copies the documents of a corpus to a file of JSON lines."""

    path: Path
    corpus: Corpus

    @property
    def texts(self) -> Path:
        return self.path.with_suffix(".jsonl")

    def run(self, report: Report) -> dict[str, Any]:
        with replacing(self.texts) as partial, open(partial, "w") as file:
            file.writelines(json.dumps({SAMPLE_FIELD: text}) + "\n" for text in self.corpus)
        report({"parts": 1})
        return {"parts": 1}


def train_tokenizer(split: Split, vocab_size: int, sample_size: int, workspace: Workspace) -> Tokenizer:
    """A tokenizer trained on about `sample_size` bytes of training documents, once for all runs."""
    path = workspace.path("tokenizer", split.sha256, split.train.stamp(), vocab_size, sample_size)
    if not path.exists():
        parts = split.sample(sample_size).parts()
        tasks = [SampleTask(workspace.path("sample", part.stamp()), part) for part in parts]
        workspace.run("sampling text for the tokenizer", tasks, "parts", len(tasks))
        texts = TextFiles(tuple(task.texts for task in tasks), SAMPLE_FIELD)
        tokenizer = tokenizer_lib.train_tokenizer(texts, vocab_size)
        with replacing(path) as partial:
            tokenizer.save(str(partial))
        workspace.forget("sample")
    return tokenizer_lib.load_tokenizer(path)


@dataclasses.dataclass(frozen=True)
class TokeniseTask:
    """Turns the documents of a corpus into files of tokens, segments, an end of text behind every document.

    The result counts documents, tokens (ends of text among them) and bytes of text, and lists the
    tokens of each segment.
    """

    path: Path
    corpus: Corpus
    tokenizer: Path
    segment_tokens: int  # a segment is complete with the document that brings it there

    def segment(self, number: int) -> Path:
        """The file of a segment: tokens in the type of the vocabulary."""
        return self.path.with_suffix("") / f"{number:05d}.tokens"

    def run(self, report: Report) -> dict[str, Any]:
        saved = list(self._saved())
        for counts in saved:
            report({"saved": counts})
        documents = itertools.islice(self.corpus, sum(counts["documents"] for counts in saved), None)
        arrays = tokenizer_lib.tokenize(documents, _load(self.tokenizer))
        segments = [*saved, *self._write(arrays, len(saved), report)]
        total = {key: sum(counts[key] for counts in segments) for key in ("documents", "tokens", "bytes")}
        return {**total, "segments": [counts["tokens"] for counts in segments]}

    def _saved(self) -> Iterator[dict[str, int]]:
        """Counts of the segments that an earlier run completed."""
        for number in itertools.count():
            counts = self.segment(number).with_suffix(".json")
            if not counts.exists():
                return
            yield json.loads(counts.read_text())

    def _write(self, arrays: Iterator[np.ndarray], number: int, report: Report) -> Iterator[dict[str, int]]:
        tokenizer = _load(self.tokenizer)
        end_of_text = tokenizer_lib.end_of_text(tokenizer)
        lengths = tokenizer_lib.bytes_per_token(tokenizer)
        for first in arrays:
            path = self.segment(number)
            counts = {"documents": 0, "tokens": 0, "bytes": 0}
            with replacing(path) as partial, open(partial, "wb") as file:
                for tokens in itertools.chain([first], arrays):
                    np.append(tokens, tokens.dtype.type(end_of_text)).tofile(file)
                    counts["documents"] += 1
                    counts["tokens"] += len(tokens) + 1
                    counts["bytes"] += int(lengths[tokens].sum(dtype=np.int64))
                    if counts["tokens"] >= self.segment_tokens:
                        break
            save_json(path.with_suffix(".json"), counts)
            report(counts)
            yield counts
            number += 1


def tokenise(split: Split, tokenizer: Tokenizer, fingerprint: str, workspace: Workspace) -> dict[str, TokenisedPart]:
    """Tokens of the parts "train" and "heldout".

    Args:
      split: what to tokenise.
      tokenizer: with what.
      fingerprint: of the tokenizer.
      workspace: for the results.
    """
    saved = workspace.path("tokenizer", fingerprint)
    if not saved.exists():
        with replacing(saved) as partial:
            tokenizer.save(str(partial))
    tasks = {
        name: [
            TokeniseTask(
                workspace.path("tokens", part.stamp(), fingerprint, SEGMENT_TOKENS), part, saved, SEGMENT_TOKENS
            )
            for part in corpus.parts()
        ]
        for name, corpus in (("train", split.train), ("heldout", split.heldout))
    }
    everything = [task for part in tasks.values() for task in part]
    results = iter(workspace.run("tokenising", everything, "documents", split.documents))
    return {name: TokenisedPart.of(part, list(itertools.islice(results, len(part)))) for name, part in tasks.items()}


@dataclasses.dataclass(frozen=True)
class TokenisedPart:
    """One part of a split as tokens.

    Attributes:
      counts: documents, tokens (ends of text among them) and bytes of text.
      files: segments in order, with the number of tokens in each.
    """

    counts: dict[str, int]
    files: list[tuple[Path, int]]

    @classmethod
    def of(cls, tasks: list[TokeniseTask], results: list[dict[str, Any]]) -> TokenisedPart:
        counts = {key: sum(result[key] for result in results) for key in ("documents", "tokens", "bytes")}
        files = [
            (task.segment(number), tokens)
            for task, result in zip(tasks, results, strict=True)
            for number, tokens in enumerate(result["segments"])
        ]
        return cls(counts, files)


@dataclasses.dataclass(frozen=True)
class WriteTask:
    """Writes windows to an ArrayRecord file.

    The result counts windows and the bytes of their records.
    """

    path: Path
    shard: Path
    spans: list[Span]
    seq_len: int
    dtype: np.dtype

    def run(self, report: Report) -> dict[str, Any]:
        features = window_features(self.seq_len, self.dtype)
        pieces = (span.read(self.dtype) for span in self.spans)
        counts = {"windows": 0, "bytes": 0}
        with replacing(self.shard) as partial:
            writer = array_record_module.ArrayRecordWriter(str(partial), "group_size:1")
            for windows in packing.cut(pieces, self.seq_len):
                for window in windows:
                    record = features.serialize_example({"tokens": window})
                    writer.write(record)
                    counts["bytes"] += len(record)
                counts["windows"] += len(windows)
            writer.close()
        report({"windows": counts["windows"], "tokens": counts["windows"] * self.seq_len})
        return counts


def write(
    parts: dict[str, TokenisedPart],
    folder: Path,
    *,
    seq_len: int,
    dtype: np.dtype,
    shard_windows: int,
    workspace: Workspace,
) -> dict[str, list[dict[str, Any]]]:
    """Writes the windows of each part to shards in `folder`.

    Args:
      parts: by name.
      folder: where the shards are, those of an earlier run among them.
      seq_len: targets of a window.
      dtype: of the tokens.
      shard_windows: at most so many in a file.
      workspace: for the results.

    Returns:
      For each part the windows and bytes of its shards, whose files are named by `shard_name`.
    """
    if not folder.exists():  # or an earlier run has moved it to its place, and was killed before it could say so
        workspace.forget("shards")
    tasks: dict[str, list[WriteTask]] = {}
    total = 0
    for name, part in parts.items():
        stream = packing.Stream(part.files)
        windows = packing.count_windows(len(stream), seq_len)
        total += windows
        tasks[name] = []
        for number, first in enumerate(range(0, windows, shard_windows)):
            shard = folder / shard_name(name, number)
            spans = stream.window_spans(first, min(first + shard_windows, windows), seq_len)
            path = workspace.path("shards", shard, seq_len, spans)
            tasks[name].append(WriteTask(path, shard, spans, seq_len, dtype))
    everything = [task for part in tasks.values() for task in part]
    results = iter(workspace.run("writing windows", everything, "windows", total))
    return {name: list(itertools.islice(results, len(part))) for name, part in tasks.items()}


def shard_name(part: str, number: int) -> str:
    """File name of a shard, as `SHARD_TEMPLATE` has it."""
    return f"{DATASET}-{part}.array_record-{number:05d}"


def window_features(seq_len: int, dtype: np.dtype) -> tfds.features.FeaturesDict:
    """What a record holds."""
    return tfds.features.FeaturesDict(
        {"tokens": tfds.features.Tensor(shape=(seq_len + 1,), dtype=dtype, encoding="bytes")}
    )


@functools.lru_cache(maxsize=1)
def _load(path: Path) -> Tokenizer:
    return tokenizer_lib.load_tokenizer(path)
