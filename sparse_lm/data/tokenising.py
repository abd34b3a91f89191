"""The third stage of a preparation: turns documents into files of tokens, part by part of the corpus."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.corpus import Corpus
from sparse_lm.data.holdout import Split
from sparse_lm.data.tasks import Report, save_json
from sparse_lm.data.workspace import Workspace
from sparse_lm.files import replacing

SEGMENT_TOKENS = 8 * 2**20  # after which a task saves what it has, so that a kill loses no more of a large file


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


@functools.lru_cache(maxsize=1)
def _load(path: Path) -> Tokenizer:
    return tokenizer_lib.load_tokenizer(path)
