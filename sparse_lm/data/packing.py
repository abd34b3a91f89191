"""Packs documents of any length into windows of one length, with no token lost or repeated.

Documents, each with an end of text behind it, form one stream that goes round: after its last token comes its first.
Window w is the tokens from w * seq_len - 1 to (w + 1) * seq_len - 1, both included. As a model reads a window as
inputs w[:-1] and targets w[1:], every token is a target exactly once, the first one predicted from the end of text
that closes the stream; what the last window lacks is filled up from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np


class Stream:
    """Joins the tokens in files into one stream that goes round.

    Args:
      paths: the files, which hold nothing but tokens.
      dtype: of the tokens.
    """

    def __init__(self, paths: Sequence[Path], dtype: np.dtype):
        self._paths, self._dtype = paths, np.dtype(dtype)
        self._ends = np.cumsum([path.stat().st_size // self._dtype.itemsize for path in paths], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def count_windows(self, seq_len: int) -> int:
        """Counts the windows that the stream gives."""
        return -(-len(self) // seq_len)

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
