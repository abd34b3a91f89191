"""The held-out split: which documents are for evaluation only.

The choice is by content: a document's rank is 64 bits of the SHA-256 of its text (or tokens), and
the documents of lowest rank are held out. The same document is thus on the same side in every run
and on every machine, wherever it stands in the corpus, and two copies of it are never apart.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Iterator

import numpy as np

from sparse_lm.data.corpus import Corpus, Document, pieces
from sparse_lm.data.errors import DataError

RANKS = 2**64
HELDOUT_SHARE = 0.02  # of the documents
HELDOUT_BYTES = 64 * 2**20  # but about this much at most: evaluation reads a fixed number of windows
LONE_DOCUMENT_PIECES = 10


@dataclasses.dataclass(frozen=True)
class RankRange:
    """The documents of `corpus` with start <= rank < stop."""

    corpus: Corpus
    start: int
    stop: int

    def __iter__(self) -> Iterator[Document]:
        return (document for document in self.corpus if self.start <= _rank(_digest(document)) < self.stop)


@dataclasses.dataclass(frozen=True)
class Split:
    """A corpus in two parts.

    Attributes:
      train, heldout: disjoint corpora.
      size: bytes of text (or of int64 tokens) of the training part's source.
      sha256: of that source, over the digests of its documents in order.
    """

    train: Corpus
    heldout: Corpus
    size: int
    sha256: str

    def sample(self, size: int) -> Corpus:
        """About `size` bytes of training documents, picked by rank; all of them if there are not more."""
        share = min(1.0, size / self.size)
        return RankRange(self.train, int(RANKS * (1 - share)), RANKS)


def hold_out(corpus: Corpus) -> Split:
    """Holds out about 2% of the documents, at least one and never all.

    A corpus of a single document is cut into ten first.

    Raises:
      DataError: no documents, or a single one too short to be cut.
    """
    survey = _survey(corpus)
    if survey.lowest == survey.highest:
        corpus = _Cut(corpus)
        survey = _survey(corpus)
    if survey.lowest == survey.highest:
        raise DataError("the corpus is a single short document: there must be another one to hold out")
    share = min(HELDOUT_SHARE, HELDOUT_BYTES / survey.size)
    bound = min(max(int(RANKS * share), survey.lowest + 1), survey.highest)
    return Split(RankRange(corpus, bound, RANKS), RankRange(corpus, 0, bound), survey.size, survey.sha256)


def already_split(train: Corpus, heldout: Corpus) -> Split:
    """A corpus that comes with its own held-out documents.

    Raises:
      DataError: either part is empty.
    """
    _survey(heldout)
    survey = _survey(train)
    return Split(train, heldout, survey.size, survey.sha256)


@dataclasses.dataclass(frozen=True)
class _Survey:
    size: int
    lowest: int
    highest: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Every text of `corpus` in about `LONE_DOCUMENT_PIECES` pieces; tokens cannot be cut."""

    corpus: Corpus

    def __iter__(self) -> Iterator[Document]:
        for document in self.corpus:
            if isinstance(document, str):
                yield from pieces(io.StringIO(document, newline=""), -(-len(document) // LONE_DOCUMENT_PIECES))
            else:
                yield document


def _survey(corpus: Corpus) -> _Survey:
    total, size, lowest, highest = hashlib.sha256(), 0, RANKS, 0
    for document in corpus:
        digest = _digest(document)
        total.update(digest)
        size += len(_content(document))
        lowest, highest = min(lowest, _rank(digest)), max(highest, _rank(digest))
    if not size:
        raise DataError("the corpus is empty: it has no document with any text")
    return _Survey(size, lowest, highest, total.hexdigest())


def _content(document: Document) -> bytes:
    return document.encode("utf-8") if isinstance(document, str) else np.asarray(document, "<i8").tobytes()


def _digest(document: Document) -> bytes:
    return hashlib.sha256(_content(document)).digest()


def _rank(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")
