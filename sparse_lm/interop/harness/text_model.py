"""A trained model with its tokenizer, and log-likelihoods of the ends of sequences by it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from tokenizers import Tokenizer
from tqdm import tqdm

from sparse_lm.errors import UserError
from sparse_lm.model import llama
from sparse_lm.model.decode import round_up
from sparse_lm.model.loss import unembed


class HarnessError(UserError):
    """Tasks that cannot be evaluated: a missing package, an unknown task, or a request that a model cannot answer."""


class Batch(NamedTuple):
    """Sequences to compute together."""

    indices: Sequence[int]  # of the sequences, at most `rows`
    rows: int  # sequences that the shape has room for; every batch of this length has the same
    length: int  # tokens that the shape has room for in each row


@dataclasses.dataclass(frozen=True)
class TextModel:
    """Holds what the harness evaluates."""

    graphdef: nnx.GraphDef
    params: llama.Params
    tokenizer: Tokenizer
    end_of_text: int  # the token that ends every document, and starts one where nothing else does
    seq_len: int  # the most tokens that the model takes
    batch_tokens: int  # to compute at one time, padding included, unless one sequence has more

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

    def log_likelihoods(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[tuple[float, bool]]:
        """Scores the end of each sequence: tokens, and how many of the last are scored given all that is before them.

        The first is never scored, and the last only predicted: there may be one more than the model takes.

        Returns:
          For each sequence, the sum of log p(token) over its scored tokens, in nats, and whether each of
          them is the most probable one.
        """
        results = [(0.0, True)] * len(sequences)
        lengths = [len(tokens) - 1 for tokens, _ in sequences]
        with tqdm(total=len(sequences), desc="log-likelihoods", disable=None) as bar:
            for batch in self.batches(lengths):
                windows = np.zeros((batch.rows, batch.length + 1), np.int32)
                for row, index in zip(windows, batch.indices, strict=False):
                    tokens, _ = sequences[index]
                    row[: len(tokens)] = tokens
                log_probs, greedy = jax.device_get(_score(self.graphdef, self.params, jax.device_put(windows)))
                for row, index in enumerate(batch.indices):
                    _, count = sequences[index]
                    scored = slice(lengths[index] - count, lengths[index])
                    total = log_probs[row, scored].sum(dtype=np.float64)
                    results[index] = float(total), bool(greedy[row, scored].all())
                bar.update(len(batch.indices))
        return results


@jax.jit
def _score(graphdef: nnx.GraphDef, params: llama.Params, windows: Array) -> tuple[Array, Array]:
    """Returns log-probabilities f32[B, S] of the last S of tokens int32[B, S + 1], and which are the most probable.

    A row may end in padding: causality keeps it from what is before.
    """
    model = llama.merge(graphdef, params)
    hidden, _ = model(windows[:, :-1])
    table = model.unembedding().astype(hidden.dtype)

    def score(inputs):
        hidden, target = inputs
        logits = unembed(hidden, table)
        return logits[target] - jax.nn.logsumexp(logits), jnp.argmax(logits) == target

    tokens = hidden.reshape(-1, hidden.shape[-1]), windows[:, 1:].reshape(-1)
    log_probs, greedy = lax.map(score, tokens, batch_size=model.config.loss_chunk)
    shape = hidden.shape[:2]
    return log_probs.reshape(shape), greedy.reshape(shape)
