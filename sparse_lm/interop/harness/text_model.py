"""A trained model with all that turns text into its scores."""

from __future__ import annotations

import dataclasses

from flax import nnx
from tokenizers import Tokenizer

from sparse_lm.model import llama


class HarnessError(ValueError):
    """Tasks that cannot be evaluated: a missing package, an unknown task, or a request that a model cannot answer."""


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
