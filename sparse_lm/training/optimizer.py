"""AdamW or Muon as language models are trained with them: clipped gradients, decay on matrices only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import Array
from optax import contrib

from sparse_lm.config import Config
from sparse_lm.model import llama
from sparse_lm.training.schedule import learning_rate

MUON = "muon"
_MATRIX = contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=1)  # of [L, rows, columns]
_RMS_OF_ADAMW = 0.2  # of an update's entries before the learning rate (2502.16982, section 2.2)


def make_optimizer(
    config: Config, after_clip: optax.GradientTransformation | None = None
) -> optax.GradientTransformationExtraArgs:
    """Makes AdamW (1711.05101) or Muon with clipping by global norm and the run's learning-rate schedule.

    Muon orthogonalises the momentum of the layers' matrices, each as it is stored, and scales it so that its entries
    are about as large as AdamW's (2502.16982): learning rate and weight decay mean the same for both. Embedding,
    unembedding and norm scales have AdamW.

    Moments are computed in float32, whatever the dtype of the gradients. AdamW's are rounded to the nearest where they
    are kept in bfloat16. Weight decay applies to matrices, the embedding and the unembedding among them, and to no norm
    scale or router's bias.

    Args:
      config: the run; `optimizer` and `steps` are read.
      after_clip: a recipe's change to the clipped gradients, before they enter the moments (masked
        decay of 2404.01847). Keyword arguments of `update` reach it.

    Returns:
      A transformation whose `update` needs the parameters, and ignores keyword arguments that `after_clip`
      does not read.
    """
    options = config.optimizer
    adam = optax.scale_by_adam(options.beta1, options.beta2, options.epsilon, mu_dtype=jnp.float32)
    adam = _kept_in(options.moments, adam)
    chain = optax.chain(
        optax.clip_by_global_norm(options.clip_norm),
        after_clip or optax.identity(),
        _muon(adam) if options.name == MUON else adam,
        optax.add_decayed_weights(options.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(learning_rate(config)),
    )
    return optax.with_extra_args_support(chain)


def _kept_in(dtype: str, transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Makes a transformation that computes as another one does, and keeps that one's float32 state in a dtype."""

    def cast(state: optax.OptState, dtype: str) -> optax.OptState:
        return jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, state)

    def init(params: optax.Params) -> optax.OptState:
        return cast(transformation.init(params), dtype)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, state = transformation.update(updates, cast(state, "float32"), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)


def decay_mask(params: optax.Params) -> optax.Params:
    """Returns a tree of bool like `params`: False for norm scales and routers' biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: llama.is_matrix(path), params)


def _muon(others: optax.GradientTransformation) -> optax.GradientTransformation:
    """Makes Muon for the layers' matrices, with the momentum of its authors, 0.95, and `others` for the rest."""

    def dimensions(updates: optax.Updates) -> optax.Updates:
        return jax.tree.map(lambda _: _MATRIX, updates)

    def labels(params: optax.Params) -> optax.Params:
        def label(path: tuple[jax.tree_util.DictKey, ...], _: Array) -> str:
            return MUON if path[0].key == "layers" and llama.is_matrix(path) else "others"

        return jax.tree_util.tree_map_with_path(label, params)

    def like_adamw(updates: optax.Updates, params: optax.Params) -> optax.Updates:
        """An orthogonal matrix [m, n] has a root mean square of 1 / sqrt(max(m, n))."""
        return jax.tree.map(lambda u: _RMS_OF_ADAMW * max(u.shape[1:]) ** 0.5 * u, updates)

    orthogonalise = contrib.scale_by_muon(mu_dtype=jnp.float32, weight_dimension_numbers=dimensions)
    muon = optax.chain(orthogonalise, optax.stateless(like_adamw))
    return optax.partition({MUON: muon, "others": others}, labels)
