"""The held-out split: which documents are for evaluation only.

The choice is by content: a document's rank is 64 bits of the SHA-256 of its text (or tokens), and
the documents of lowest rank are held out. The same document is thus on the same side in every run
and on every machine, wherever it stands in the corpus, and two copies of it are never apart.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Callable, Iterator

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
        return (document for document in self.corpus if self.start <= rank(digest(document)) < self.stop)

    def parts(self) -> list[RankRange]:
        return [RankRange(part, self.start, self.stop) for part in self.corpus.parts()]

    def stamp(self) -> str:
        return f"{self.corpus.stamp()} {self.start} {self.stop}"


@dataclasses.dataclass(frozen=True)
class Survey:
    """What reading a corpus once tells.

    Attributes:
      documents: how many.
      size: bytes of text, or of int64 tokens.
      lowest, highest: ranks.
      sha256: over the digests of the documents in order.
    """

    documents: int
    size: int
    lowest: int
    highest: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Split:
    """A corpus in two parts.

    Attributes:
      train, heldout: disjoint corpora.
      documents: in both.
      size: bytes of text (or of int64 tokens) of the training part's source.
      sha256: of that source, over the digests of its documents in order.
    """

    train: Corpus
    heldout: Corpus
    documents: int
    size: int
    sha256: str

    def sample(self, size: int) -> Corpus:
        """About `size` bytes of training documents, picked by rank; all of them if there are not more."""
        share = min(1.0, size / self.size)
        return RankRange(self.train, int(RANKS * (1 - share)), RANKS)


def survey_corpus(corpus: Corpus, take: Callable[[bytes], object] = len) -> Survey:
    """Reads a corpus once.

    Args:
      corpus: what to read.
      take: is given the digest of each document in turn.
    """
    total = hashlib.sha256()
    documents, size, lowest, highest = 0, 0, RANKS, 0
    for document in corpus:
        value = digest(document)
        total.update(value)
        take(value)
        documents += 1
        size += len(content(document))
        lowest, highest = min(lowest, rank(value)), max(highest, rank(value))
    return Survey(documents, size, lowest, highest, total.hexdigest())


def hold_out(corpus: Corpus, survey: Callable[[Corpus], Survey] = survey_corpus) -> Split:
    """Holds out about 2% of the documents, at least one and never all.

    A corpus of a single document is cut into ten first.

    Args:
      corpus: what to split.
      survey: reads a corpus, as `survey_corpus` does.

    Raises:
      DataError: no documents, or a single one too short to be cut.
    """
    found = _not_empty(survey(corpus))
    if found.lowest == found.highest:
        corpus = Cut(corpus)
        found = survey(corpus)
    if found.lowest == found.highest:
        raise DataError("the corpus is a single short document: there must be another one to hold out")
    share = min(HELDOUT_SHARE, HELDOUT_BYTES / found.size)
    bound = min(max(int(RANKS * share), found.lowest + 1), found.highest)
    train, heldout = RankRange(corpus, bound, RANKS), RankRange(corpus, 0, bound)
    return Split(train, heldout, found.documents, found.size, found.sha256)


def already_split(train: Corpus, heldout: Corpus, survey: Callable[[Corpus], Survey] = survey_corpus) -> Split:
    """A corpus that comes with its own held-out documents.

    Args:
      train, heldout: the two parts.
      survey: reads a corpus, as `survey_corpus` does.

    Raises:
      DataError: either part is empty.
    """
    rest = _not_empty(survey(heldout))
    found = _not_empty(survey(train))
    return Split(train, heldout, found.documents + rest.documents, found.size, found.sha256)


@dataclasses.dataclass(frozen=True)
class Cut:
    """Every text of `corpus` in about `LONE_DOCUMENT_PIECES` pieces; tokens cannot be cut."""

    corpus: Corpus

    def __iter__(self) -> Iterator[Document]:
        for document in self.corpus:
            if isinstance(document, str):
                yield from pieces(io.StringIO(document, newline=""), -(-len(document) // LONE_DOCUMENT_PIECES))
            else:
                yield document

    def parts(self) -> list[Cut]:
        return [Cut(part) for part in self.corpus.parts()]

    def stamp(self) -> str:
        return f"{self.corpus.stamp()} cut"


def content(document: Document) -> bytes:
    """What a document is told by: UTF-8, or its tokens as int64."""
    return document.encode("utf-8") if isinstance(document, str) else np.asarray(document, "<i8").tobytes()


def digest(document: Document) -> bytes:
    """SHA-256 of its content."""
    return hashlib.sha256(content(document)).digest()


def rank(digest: bytes) -> int:
    """0 <= rank < `RANKS`, evenly distributed over documents."""
    return int.from_bytes(digest[:8], "big")


def _not_empty(survey: Survey) -> Survey:
    if not survey.size:
        raise DataError("the corpus is empty: it has no document with any text")
    return survey
