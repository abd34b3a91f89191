"""Packs documents of any length into windows of one length, with no token lost or repeated.

Documents, each with an end of text behind it, form one stream that goes round: after its last token comes its first.
Window w is the tokens from w * seq_len - 1 to (w + 1) * seq_len - 1, both included. As a model reads a window as
inputs w[:-1] and targets w[1:], every token is a target exactly once, the first one predicted from the end of text
that closes the stream; what the last window lacks is filled up from the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Span:
    """Names the tokens of a file from `start` to `stop`."""

    path: Path
    start: int
    stop: int

    def read(self, dtype: np.dtype) -> np.ndarray:
        return np.fromfile(self.path, dtype, self.stop - self.start, offset=self.start * dtype.itemsize)


class Stream:
    """Joins tokens in files, each given with the number of its tokens, into one stream that goes round."""

    def __init__(self, files: Sequence[tuple[Path, int]]):
        self._paths = [path for path, _ in files]
        self._ends = np.cumsum([length for _, length in files], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def window_spans(self, first: int, last: int, seq_len: int) -> list[Span]:
        """Finds the windows from `first` to before `last`."""
        return list(self._spans(first * seq_len - 1, last * seq_len))

    def _spans(self, start: int, stop: int) -> Iterator[Span]:
        while start < stop:
            position = start % len(self)
            index = int(np.searchsorted(self._ends, position, side="right"))
            offset = int(self._ends[index - 1]) if index else 0
            count = min(stop - start, int(self._ends[index]) - position)
            yield Span(self._paths[index], position - offset, position - offset + count)
            start += count


def count_windows(tokens: int, seq_len: int) -> int:
    """Counts the windows that a stream of so many tokens gives."""
    return -(-tokens // seq_len)


def cut(pieces: Iterable[np.ndarray], seq_len: int) -> Iterator[np.ndarray]:
    """Cuts tokens into windows, each of which starts with the last token of the one before.

    Args:
      pieces: consecutive 1-D arrays of one dtype, of any lengths.
      seq_len: targets of a window.

    Yields:
      [n, seq_len + 1] windows, in order; views, to be used before the next. Tokens at the end that fill no window
      are left out.
    """
    rest = np.empty(0, np.uint16)
    for piece in pieces:
        stream = np.concatenate([rest.astype(piece.dtype), piece])
        if len(stream) > seq_len:
            windows = np.lib.stride_tricks.sliding_window_view(stream, seq_len + 1)[::seq_len]
            yield windows
            stream = stream[len(windows) * seq_len :]
        rest = stream
