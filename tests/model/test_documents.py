"""Attention within documents: what shares a window with others is computed as if it were alone."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from sparse_lm.config import ModelConfig
from sparse_lm.model import llama
from tests.model import numpy_llama
from tests.model.test_llama import logits

END = 7  # of a text
WHOLE = ModelConfig(dim=24, layers=3, heads=4, kv_heads=2, ffn_dim=48, vocab_size=61, dtype="float32", loss_chunk=24)
MODEL = dataclasses.replace(WHOLE, document_separator=END)
STARTS = (0, 5, 6, 19)  # a window begins inside a document; the second one has no text
LENGTH = 30
WINDOWS = np.random.default_rng(0).integers(8, 61, (2, LENGTH + 1)).astype(np.int32)
WINDOWS[0, list(STARTS[1:])] = END


def documents():
    """The windows int[1, n + 1] of each document alone, all but the first opened by the end of the one before."""
    for window, starts in zip(WINDOWS, (STARTS, (0,)), strict=True):
        for start, end in zip(starts, (*starts[1:], LENGTH), strict=True):
            yield window[None, start : end + 1]


@pytest.mark.parametrize("remat", ["none", "save_dots"])
def test_each_document_is_computed_as_if_it_were_alone(remat):
    params = jax.jit(functools.partial(llama.init, MODEL))(jax.random.key(0))[1]
    params = jax.tree.map(lambda x: 3 * x if x.ndim > 2 else x, params)  # or attention would hardly matter
    alone = [numpy_llama.forward(params, WHOLE, document[:, :-1])[0] for document in documents()]
    config = dataclasses.replace(MODEL, remat=remat, unroll_layers=remat != "none")
    together = np.concatenate(logits(llama.graphdef(config), params, WINDOWS[:, :-1]))
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-4, atol=1e-5)
    without = np.concatenate(logits(llama.graphdef(WHOLE), params, WINDOWS[:, :-1]))
    difference = np.abs(without - np.concatenate(alone)).max(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(difference > 1e-3), np.arange(STARTS[1], LENGTH))
