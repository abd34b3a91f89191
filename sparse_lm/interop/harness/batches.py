"""Sequences of many lengths as batches of few shapes, so that few shapes are compiled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sparse_lm.model.decode import round_up


class Batch(NamedTuple):
    """Sequences to compute together.

    Attributes:
      indices: of the sequences, at most `rows`.
      rows: sequences that the shape has room for; every batch of this length has the same.
      length: tokens that the shape has room for in each row.
    """

    indices: Sequence[int]
    rows: int
    length: int


def batches(lengths: Sequence[int], longest: int, batch_tokens: int) -> Iterator[Batch]:
    """Yields each index into `lengths` once, the longest sequences first, since these may not fit in memory.

    Args:
      lengths: tokens of each sequence, at most `longest`.
      longest: the most tokens that the model takes.
      batch_tokens: tokens of a batch, padding included, unless one sequence is longer.
    """
    by_length = defaultdict(list)
    for index, length in enumerate(lengths):
        by_length[min(round_up(length), longest)].append(index)
    for length, indices in sorted(by_length.items(), reverse=True):
        rows = max(1, batch_tokens // length)
        for start in range(0, len(indices), rows):
            yield Batch(indices[start : start + rows], rows, length)
