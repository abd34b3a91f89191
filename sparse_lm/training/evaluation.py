"""Held-out loss, the same number for every batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from sparse_lm.collectives import ONE_DEVICE, Axes
from sparse_lm.config import Config
from sparse_lm.model import llama
from sparse_lm.model.linear import compiler_options
from sparse_lm.model.loss import token_losses
from sparse_lm.recipes import DENSE, Recipe
from sparse_lm.training.mesh.layout import BATCH, Layout

Evaluation = Callable[[llama.Params, Any, Iterable[np.ndarray]], dict[str, float]]


def make_evaluation(
    config: Config,
    graphdef: nnx.GraphDef,
    bytes_per_token: np.ndarray,
    recipe: Recipe = DENSE,
    layout: Layout | None = None,
) -> Evaluation:
    """Makes an evaluation, which compiles on its first use.

    `bytes_per_token` int32[V] are the UTF-8 bytes that each token stands for. Each token's loss is computed from it and
    its past alone (`Recipe.for_evaluation`). With a layout every process gives all batches, whole.

    Returns:
      A function of (params, recipe_state, batches), where a batch is int32[b, S + 1] windows of tokens
      with b at most `config.batch_size`; a window's first S tokens predict its last S. Its result:

      - loss: nats per predicted token, the mean over all of them;
      - perplexity: exp(loss);
      - bits_per_byte: the sum of the losses in bits, over the bytes of the predicted tokens, which
        compares models of different vocabularies.
    """
    recipe = recipe.for_evaluation()

    def window_nats(params: llama.Params, recipe_state: Any, windows: Array, axes: Axes = ONE_DEVICE) -> Array:
        """Returns f32[B], the sum of each window's token losses."""
        model, dense_layers = llama.merge(graphdef, params), config.sparsity.dense_layers
        options = dict(recipe=recipe, recipe_state=recipe_state, dense_layers=dense_layers, axes=axes)
        hidden, _ = model(windows[:, :-1], **options)
        hidden, targets = hidden.reshape(-1, hidden.shape[-1]), windows[:, 1:].reshape(-1)
        losses = token_losses(hidden, model.unembedding(axes), targets, config.model.loss_chunk)
        return jnp.sum(losses.reshape(windows.shape[0], -1), axis=1)

    def on_mesh(params: llama.Params, recipe_state: Any, windows: Array) -> Array:
        specs = layout.specs((params, recipe_state))
        return layout.local(window_nats, (*specs, BATCH), BATCH)(params, recipe_state, windows)

    compiled = jax.jit(
        on_mesh if layout else window_nats,
        compiler_options=compiler_options(config.model.precision),
        out_shardings=layout.replicated if layout else None,
    )
    place = layout.place_batch if layout else jax.device_put

    def evaluate(params: llama.Params, recipe_state: Any, batches: Iterable[np.ndarray]) -> dict[str, float]:
        pending, tokens, text_bytes = [], 0, 0
        for windows in batches:
            full = np.resize(windows, (config.batch_size, windows.shape[1]))  # a short batch repeats its windows
            pending.append((compiled(params, recipe_state, place(full)), len(windows)))
            tokens += windows[:, 1:].size
            text_bytes += int(bytes_per_token[windows[:, 1:]].sum())
        nats = float(sum(sums[:count].sum(dtype=np.float64) for sums, count in jax.device_get(pending)))
        with np.errstate(over="ignore"):
            perplexity = float(np.exp(nats / tokens))
        return {"loss": nats / tokens, "perplexity": perplexity, "bits_per_byte": nats / math.log(2) / text_bytes}

    return evaluate
