"""Log-likelihoods of the ends of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from tqdm import tqdm

from sparse_lm.interop.harness.text_model import TextModel
from sparse_lm.model import llama
from sparse_lm.model.embedding import unembed


class Scored(NamedTuple):
    """Tokens, the last `count` of which are scored given all that is before them.

    The first is never scored, and the last only predicted: there may be one more than the model takes.
    """

    tokens: Sequence[int]
    count: int


def log_likelihoods(model: TextModel, sequences: Sequence[Scored]) -> list[tuple[float, bool]]:
    """Scores the end of each sequence.

    Args:
      model: at most `seq_len` + 1 tokens a sequence.
      sequences: in any order.

    Returns:
      For each sequence, the sum of log p(token) over its scored tokens, in nats, and whether each of
      them is the most probable one.
    """
    results = [(0.0, True)] * len(sequences)
    lengths = [len(sequence.tokens) - 1 for sequence in sequences]
    with tqdm(total=len(sequences), desc="log-likelihoods", disable=None) as bar:
        for batch in model.batches(lengths):
            windows = np.zeros((batch.rows, batch.length + 1), np.int32)
            for row, index in zip(windows, batch.indices, strict=False):
                row[: lengths[index] + 1] = sequences[index].tokens
            log_probs, greedy = jax.device_get(_score(model.graphdef, model.params, jax.device_put(windows)))
            for row, index in enumerate(batch.indices):
                scored = slice(lengths[index] - sequences[index].count, lengths[index])
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
