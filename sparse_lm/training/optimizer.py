"""AdamW as language models are trained with it: clipped gradients, decay on matrices only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from sparse_lm.config import Config
from sparse_lm.model import llama
from sparse_lm.training.schedule import learning_rate


def make_optimizer(
    config: Config, after_clip: optax.GradientTransformation | None = None
) -> optax.GradientTransformationExtraArgs:
    """Makes AdamW (1711.05101) with clipping by global norm and the run's learning-rate schedule.

    Moments are float32, whatever the dtype of the gradients. Weight decay applies to matrices, the
    embedding and the unembedding among them, and to no norm scale or router's bias.

    Args:
      config: the run; `optimizer` and `steps` are read.
      after_clip: a recipe's change to the clipped gradients, before they enter the moments (masked
        decay of 2404.01847). Keyword arguments of `update` reach it.

    Returns:
      A transformation whose `update` needs the parameters, and ignores keyword arguments that `after_clip`
      does not read.
    """
    options = config.optimizer
    chain = optax.chain(
        optax.clip_by_global_norm(options.clip_norm),
        after_clip or optax.identity(),
        optax.scale_by_adam(options.beta1, options.beta2, options.epsilon, mu_dtype=jnp.float32),
        optax.add_decayed_weights(options.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(learning_rate(config)),
    )
    return optax.with_extra_args_support(chain)


def decay_mask(params: optax.Params) -> optax.Params:
    """Returns a tree of bool like `params`: False for norm scales and routers' biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: llama.is_matrix(path), params)
