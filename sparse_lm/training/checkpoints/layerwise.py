"""A trained model, read from its checkpoint a matrix at a time: models that memory holds once, or not at all."""

from __future__ import annotations

import functools
import os

import jax
import numpy as np

from sparse_lm.config import Config
from sparse_lm.training.checkpoints.checkpoint import open_params
from sparse_lm.training.checkpoints.restored import is_sparse, refuse_sparse_model
from sparse_lm.training.ffn_weights import MATRICES
from sparse_lm.training.workdir import meaning


class LayerwiseParams:
    """The parameters that `restore_for_dense` returns, one matrix of one layer at a time.

    Args:
      workdir: of a run, which may still be training.
      config: its configuration.
      checkpoint: a step, "best" (least eval_loss) or "latest".

    Attributes:
      step: of the checkpoint.

    Raises:
      WorkdirError: there is no such checkpoint, or its model is a sparse one.
    """

    def __init__(self, workdir: str | os.PathLike, config: Config, checkpoint: int | str = "latest"):
        self._params, self._recipe_state, self.step = open_params(workdir, checkpoint, run=meaning(config))
        refuse_sparse_model(workdir, config, self.step)
        sparse = is_sparse(config, self.step)
        self._first_baked = config.sparsity.dense_layers if sparse else config.model.layers
        self._recipe = config.sparsity.recipe
        self._leave = jax.jit(self._recipe.leave)
        self._ffn = functools.lru_cache(maxsize=1)(self._baked_ffn)  # `up` and `down` are asked for one after the other

    def read(self, path: tuple[str, ...], layer: int | None = None) -> np.ndarray:
        """Reads a parameter by its path as f32, or one layer of a stacked one; of the FFN's matrices always a layer."""
        if path in [("layers", "ffn", name) for name in MATRICES] and layer >= self._first_baked:
            return self._ffn(layer)[path[-1]]
        return self._params[path].read(layer)

    def _baked_ffn(self, layer: int) -> dict[str, np.ndarray]:
        matrices = [self._params["layers", "ffn", name].read(layer) for name in MATRICES]
        of_layer = {name: array.read(layer) for name, array in self._recipe_state.items()}
        effective = jax.device_get(self._leave(*matrices, self._recipe.State(**of_layer)))
        return dict(zip(MATRICES, effective, strict=True))
