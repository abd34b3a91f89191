"""A trained model with all that turns text into its scores, and the batches that it computes."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flax import nnx
from tokenizers import Tokenizer

from sparse_lm.errors import UserError
from sparse_lm.model import llama
from sparse_lm.model.decode import round_up


class HarnessError(UserError):
    """Tasks that cannot be evaluated: a missing package, an unknown task, or a request that a model cannot answer."""


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


@dataclasses.dataclass(frozen=True)
class TextModel:
    """Holds what the harness evaluates.

    Attributes:
      graphdef, params: the model, as `llama.init` returns it.
      tokenizer: the one of its training.
      end_of_text: the token that ends every document, and starts one where nothing else does.
      seq_len: the most tokens that it takes; what is longer loses its beginning.
      batch_tokens: tokens to compute at one time, padding included, unless one sequence has more.
    """

    graphdef: nnx.GraphDef
    params: llama.Params
    tokenizer: Tokenizer
    end_of_text: int
    seq_len: int
    batch_tokens: int

    def batches(self, lengths: Sequence[int]) -> Iterator[Batch]:
        """Makes batches of few shapes, so that few are compiled.

        Yields each index into `lengths`, tokens of sequences of at most `seq_len`, once: the longest sequences first,
        since these may not fit in memory.
        """
        by_length = defaultdict(list)
        for index, length in enumerate(lengths):
            by_length[min(round_up(length), self.seq_len)].append(index)
        for length, indices in sorted(by_length.items(), reverse=True):
            rows = max(1, self.batch_tokens // length)
            for start in range(0, len(indices), rows):
                yield Batch(indices[start : start + rows], rows, length)
