"""AdamW or Muon as language models are trained with them: clipped gradients, decay on matrices only, and their rate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from optax import contrib

from sparse_lm.config import Config
from sparse_lm.model import llama

MUON = "muon"
_MATRIX = contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=1)  # of [L, rows, columns]
_RMS_OF_ADAMW = 0.2  # of an update's entries before the learning rate (2502.16982, section 2.2)


def make_optimizer(
    config: Config, after_clip: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
    """Makes AdamW (1711.05101) or Muon with clipping by global norm and the run's learning-rate schedule.

    Muon orthogonalises the momentum of the layers' matrices, each as it is stored, and scales it so that its entries
    are about as large as AdamW's (2502.16982): learning rate and weight decay mean the same for both. Embedding,
    unembedding and norm scales have AdamW.

    Gradients and parameters are float32, and so moments are. AdamW's are rounded to the nearest where they are kept in
    bfloat16. Weight decay applies to matrices (`llama.is_matrix`), the embedding and the unembedding among them.

    `after_clip` is a recipe's change to the clipped gradients, before they enter the moments (masked decay of
    2404.01847). `update` needs the parameters.
    """
    options = config.optimizer
    adam = _kept_in(options.moments, optax.scale_by_adam(options.beta1, options.beta2, options.epsilon))
    return optax.chain(
        optax.stateless(lambda grads, _: _clipped(grads, options.clip_norm)),
        after_clip or optax.identity(),
        _muon(adam) if options.name == MUON else adam,
        optax.add_decayed_weights(options.weight_decay, mask=_matrices),
        optax.scale_by_learning_rate(learning_rate(config)),
    )


def gradient_norm(grads: optax.Updates) -> Array:
    """Computes the norm of the gradients of all parameters, those of the FFN's weights layer by layer.

    Where layers are unrolled, a stack is many layers' gradients that XLA concatenates as it reads, number after number.
    """
    ffn = grads["layers"]["ffn"]
    others = dict(grads, layers=dict(grads["layers"], ffn={}))
    return optax.tree.norm((others, [list(stack) for stack in ffn.values()]))


def _clipped(grads: optax.Updates, most: float) -> optax.Updates:
    norm = gradient_norm(grads)
    return optax.tree.scale(jnp.where(norm > most, most / norm, 1.0), grads)


def learning_rate(config: Config) -> optax.Schedule:
    """Makes the learning rate of each step, counted from 0.

    The warm-up rises linearly over `warmup_steps` and reaches the peak with its last step; it spends none at a
    rate of zero. Then `cosine` is half a cosine down to the final rate (1608.03983, without restarts), and `wsd`
    (2404.06395) the peak until `decay_steps` before the end and a straight line down. The last step (`steps - 1`), and
    any after it, runs at the final rate, `final_fraction` of the peak. Bad steps, which change nothing, are not
    counted: with k of them, the schedule ends k steps short.
    """
    options = config.optimizer
    peak, final = options.learning_rate, options.learning_rate * options.final_fraction
    after_warmup = config.steps - options.warmup_steps
    warmup = optax.linear_schedule(0.0, peak, options.warmup_steps)
    if options.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, after_warmup, options.final_fraction)
    else:
        decay = optax.linear_schedule(peak, final, options.decay_steps, after_warmup - options.decay_steps)
    schedule = optax.join_schedules([warmup, decay], [options.warmup_steps])
    return lambda step: schedule(step + 1)  # rates are those reached at the end of a step


def _kept_in(dtype: str, transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Makes a transformation that computes as another one does, and keeps that one's float32 state in a dtype."""

    def cast(state: optax.OptState, dtype: str) -> optax.OptState:
        return jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, state)

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params) -> tuple[Any, optax.OptState]:
        updates, state = transformation.update(updates, cast(state, "float32"), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(transformation.init(params), dtype), update)


def _matrices(params: optax.Params) -> optax.Params:
    """Returns a tree of bool like `params`: False for norm scales and routers' biases."""
    return jax.tree.map_with_path(lambda path, _: llama.is_matrix(path), params)


def _muon(others: optax.GradientTransformation) -> optax.GradientTransformation:
    """Makes Muon for the layers' matrices, with the momentum of its authors, 0.95, and `others` for the rest."""

    def label(path: tuple[jax.tree_util.DictKey, ...], _: Array) -> str:
        return MUON if path[0].key == "layers" and llama.is_matrix(path) else "others"

    def like_adamw(updates: optax.Updates, params: optax.Params) -> optax.Updates:
        """An orthogonal matrix [m, n] has a root mean square of 1 / sqrt(max(m, n))."""
        return jax.tree.map(lambda u: _RMS_OF_ADAMW * max(u.shape[1:]) ** 0.5 * u, updates)

    orthogonalise = contrib.scale_by_muon(weight_dimension_numbers=lambda tree: jax.tree.map(lambda _: _MATRIX, tree))

    def update(*args: Any) -> tuple[optax.Updates, optax.OptState]:
        with jax.default_matmul_precision("BF16_BF16_F32"):  # as its authors do; JAX itself takes TF32 on a GPU
            return orthogonalise.update(*args)

    muon = optax.chain(orthogonalise._replace(update=update), optax.stateless(like_adamw))
    return optax.partition({MUON: muon, "others": others}, lambda params: jax.tree.map_with_path(label, params))
