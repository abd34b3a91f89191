"""Held-out loss, the same number for every batch size."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
from sparse_lm.training.step import TrainState


class Evaluation:
    """Computes the held-out loss, each token's from it and its past alone (`Recipe.for_evaluation`).

    `bytes_per_token` int32[V] are the UTF-8 bytes that each token stands for. The program is compiled on its first use,
    unless it was compiled before (`lower`). It takes `batch_size` windows, on each device as many as a step has in one
    of its parts: more could need more memory than training. Without a layout there is one device.
    """

    def __init__(
        self,
        config: Config,
        graphdef: nnx.GraphDef,
        bytes_per_token: np.ndarray,
        recipe: Recipe = DENSE,
        layout: Layout | None = None,
    ):
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

        self._window_nats = jax.jit(
            on_mesh if layout else window_nats,
            compiler_options=compiler_options(config.model.precision),
            out_shardings=layout.replicated if layout else None,
        )
        self._place = layout.place_batch if layout else jax.device_put
        self.batch_size = config.batch_size // (config.microbatches if layout else config.parts)
        self._bytes_per_token = bytes_per_token

    def lower(self, state: TrainState, windows: Array) -> Any:
        """Lowers the program, as a step of training is lowered, for windows placed as a step's are."""
        sharding = windows.sharding if windows.committed else None
        placed = jax.ShapeDtypeStruct((self.batch_size, *windows.shape[1:]), windows.dtype, sharding=sharding)
        return self._window_nats.lower(state.params, state.recipe_state, placed)

    def __call__(self, params: llama.Params, recipe_state: Any, batches: Iterable[np.ndarray]) -> dict[str, float]:
        """Evaluates batches int32[b, S + 1] of windows, b at most `batch_size`.

        A window's first S tokens predict its last S. With a layout every process gives all batches, whole.

        Returns:
          "loss", the mean over all predicted tokens in nats; "perplexity", exp(loss); and "bits_per_byte", the sum of
          the losses in bits over the bytes of the predicted tokens, which compares models of different vocabularies.
        """
        pending, tokens, text_bytes = [], 0, 0
        for windows in batches:
            full = np.resize(windows, (self.batch_size, windows.shape[1]))  # a short batch repeats its windows
            pending.append((self._window_nats(params, recipe_state, self._place(full)), len(windows)))
            tokens += windows[:, 1:].size
            text_bytes += int(self._bytes_per_token[windows[:, 1:]].sum())
        nats = float(sum(sums[:count].sum(dtype=np.float64) for sums, count in jax.device_get(pending)))
        with np.errstate(over="ignore"):
            perplexity = float(np.exp(nats / tokens))
        return {"loss": nats / tokens, "perplexity": perplexity, "bits_per_byte": nats / math.log(2) / text_bytes}
