"""Packing: documents of any length into windows of one length, with no token lost or repeated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

BLOCK = 2**20  # tokens joined at one time


def pack(
    documents: Iterable[np.ndarray], *, seq_len: int, end_of_text: int, dtype: np.dtype, block: int = BLOCK
) -> Iterator[np.ndarray]:
    """Joins documents into one stream and cuts it into windows.

    The stream is an end-of-text token, then every document with an end-of-text token behind it.
    Each window starts with the last token of the one before. As a model reads a window w as inputs
    w[:-1] and targets w[1:], every token is a target exactly once. The last window is filled up
    from the start of the stream, which thus goes round.

    Args:
      documents: 1-D integer arrays whose values fit `dtype`.
      seq_len: targets of a window.
      end_of_text: the joining token.
      dtype: of the windows.
      block: tokens to gather before they are cut; only memory and speed depend on it.

    Yields:
      [n, seq_len + 1] windows, in order; views of one block, to be used before the next.
    """
    joint = np.array([end_of_text], dtype)
    pending, size, opening = [joint], 1, None
    for document in documents:
        pending += (document, joint)
        size += len(document) + 1
        if size > max(block, seq_len):
            stream = np.concatenate(pending, dtype=dtype, casting="unsafe")
            opening = stream[1 : seq_len + 1] if opening is None else opening
            windows, rest = _cut(stream, seq_len)
            yield windows
            pending, size = [rest], len(rest)
    stream = np.concatenate(pending, dtype=dtype, casting="unsafe")
    if len(stream) == 1:
        return
    opening = stream[1:] if opening is None else opening
    missing = -(len(stream) - 1) % seq_len
    yield _cut(np.concatenate([stream, np.resize(opening, missing)]), seq_len)[0]


def _cut(stream: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """The whole windows of a stream, [n, seq_len + 1], and what the next one starts with."""
    windows = np.lib.stride_tricks.sliding_window_view(stream, seq_len + 1)[::seq_len]
    return windows, stream[len(windows) * seq_len :]
