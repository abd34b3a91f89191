"""Decides which documents are held out of training, for evaluation only.

The choice is by content: a document's rank is 64 bits of the SHA-256 of its text, and the documents of
lowest rank are held out. A document of a corpus is thus on the same side in every run and on every machine, wherever it
stands there, and two copies of it are never apart. Of two corpora of different sizes one may hold it out and the other
not, as different shares are held out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from sparse_lm.data.corpus import Corpus
from sparse_lm.data.readers import pieces
from sparse_lm.errors import DataError

RANKS = 2**64
SHARE = 0.02  # of the documents is held out
LEAST, MOST = 0.5, 2.5  # times the share of the text; where documents are few, their sizes decide
HELDOUT_BYTES = 64 * 2**20  # but about this much at most: evaluation reads a fixed number of windows
LARGEST = 0.05  # of the text; larger documents are cut
SHORTEST_PIECE = 512  # bytes
COUNTED = 64  # documents of lowest rank, whose sizes a survey keeps


@dataclasses.dataclass(frozen=True)
class Selection:
    """Selects documents with start <= rank < stop, or all others; those of more than `limit` bytes are cut first."""

    corpus: Corpus
    start: int = 0
    stop: int = RANKS
    others: bool = False
    limit: int | None = None

    def __iter__(self) -> Iterator[str]:
        for document in self.corpus:
            for piece in _cut(document, self.limit) if self.limit else (document,):
                rank = int.from_bytes(hashlib.sha256(piece.encode()).digest()[:8], "big")
                if (self.start <= rank < self.stop) != self.others:
                    yield piece

    def parts(self) -> list[Selection]:
        return [dataclasses.replace(self, corpus=part) for part in self.corpus.parts()]


@dataclasses.dataclass(frozen=True)
class Survey:
    """Sums up a corpus that was read once."""

    size: int  # bytes of text
    largest: int  # bytes of the largest document
    lowest: list[tuple[int, int]]  # the `COUNTED` lowest ranks and the bytes of their documents, in order
    sha256: str  # over the digests of the documents in order
    documents: int
    replaced: int  # documents with a U+FFFD, as which bytes that are no UTF-8 are read
    repeated: int  # documents that are among those of another corpus


def survey_documents(corpus: Corpus) -> tuple[bytes, np.ndarray, int]:
    """Reads a corpus once; returns the digests and the sizes of its documents, and how many have a U+FFFD."""
    digests, sizes, replaced = bytearray(), array("Q"), 0
    for document in corpus:
        content = document.encode()
        digests += hashlib.sha256(content).digest()
        sizes.append(len(content))
        replaced += "\ufffd" in document
    return bytes(digests), np.array(sizes), replaced


def sum_up(
    parts: Iterable[tuple[bytes, np.ndarray, int]],
    others: Iterable[tuple[bytes, np.ndarray, int]] = (),
    what: str = "the corpus",
) -> Survey:
    """Sums up a corpus whose parts `survey_documents` has read, and which of its documents are in `others`.

    Raises DataError, which says `what` is empty, if there is no text in the parts.
    """
    total, size, largest, documents, replaced, repeated = hashlib.sha256(), 0, 0, 0, 0, 0
    ranks_of_others = _ranks(b"".join(digests for digests, *_ in others))
    lowest: Counter[int] = Counter()
    for digests, sizes, more in parts:
        total.update(digests)
        size, largest = size + int(sizes.sum()), max(largest, int(sizes.max(initial=0)))
        documents, replaced = documents + len(sizes), replaced + more
        ranks, which = np.unique(_ranks(digests), return_inverse=True)
        repeated += int(np.isin(ranks, ranks_of_others)[which].sum())
        together = np.bincount(which, sizes).astype(int)
        lowest.update(dict(zip(ranks[:COUNTED].tolist(), together[:COUNTED].tolist(), strict=True)))
        lowest = Counter(dict(sorted(lowest.items())[:COUNTED]))  # there may be many parts
    if not size:
        raise DataError(f"{what} is empty: it has no document with any text")
    return Survey(size, largest, list(lowest.items()), total.hexdigest(), documents, replaced, repeated)


def hold_out(corpus: Corpus, survey: Callable[[Corpus], Survey]) -> tuple[Selection, Selection, Survey]:
    """Holds out about 2% of the documents, and of the text.

    Larger documents than a twentieth of the text are cut first, at line ends, into pieces of about 2% of it. Few
    documents, whose sizes do not average out, are counted until they hold between 1% and 5% of the text.

    Returns:
      Training documents, held-out documents, and a survey of both together.

    Raises:
      DataError: there are no documents, or there is a single one, too short to be cut.
    """
    found, limit = survey(corpus), None
    if found.largest > LARGEST * found.size:
        limit = max(SHORTEST_PIECE, int(SHARE * found.size))
        found = survey(Selection(corpus, limit=limit))
    share = min(SHARE, HELDOUT_BYTES / found.size)
    start, stop, held = 0, 0, 0
    for rank, size in found.lowest:
        least, most = (factor * share * found.size for factor in (LEAST, MOST))
        if held > most or (rank >= RANKS * share and held >= least) or (held and 2 * (held + size) > found.size):
            break
        if 2 * size > found.size:  # one document again and again: never most of the text is held out
            start = rank + 1
        else:
            stop, held = rank + 1, held + size
    else:
        stop = max(stop, int(RANKS * share))  # all that were counted are held out, and others of so many
    if not held:
        raise DataError(
            "the corpus is a single short document, perhaps repeated: there must be another one to hold out"
        )
    heldout = Selection(corpus, start, stop, limit=limit)
    return dataclasses.replace(heldout, others=True), heldout, found


def sample(corpus: Corpus, share: float) -> Selection:
    """Picks about so much of a corpus, by rank, and none of what is held out of it; all of it for a share of 1."""
    return Selection(corpus, int(RANKS * (1 - share)))


def _ranks(digests: bytes) -> np.ndarray:
    """Returns the ranks of documents with these SHA-256s, one behind the other."""
    return np.frombuffer(digests, ">u8")[::4]


def _cut(document: str, limit: int) -> Iterable[str]:
    """Cuts a document of more than `limit` bytes into about equal pieces, at line ends."""
    count = -(-len(document.encode()) // limit)
    return [document] if count <= 1 else pieces(io.StringIO(document, newline=""), -(-len(document) // count))
