"""A mixture of experts: each token is computed by k of E FFNs, whose products a recipe computes.

The router is float32. A token's logits are products with its input, over sqrt(D): without the root a step of Adam moves
them by about as much as they differ, and routing settles before experts have learnt anything. A token's scores are the
softmax or the sigmoid of its logits; it goes to the k experts of largest score + bias, and its gates are the scores of
these, without the bias, over their sum. So every decision is made from one token alone. No token is dropped, whatever
the loads.

    bias      only selects, and is trained by no gradient: after each step it rises for experts with less than an even
              load and falls for the others (auxiliary-loss-free balancing, 2408.15664);
    z-loss    mean square of the logits' log-sum-exp, which keeps them small (2202.08906).

Expert e has neurons e Fe to (e + 1) Fe of `up` and of `down`; with a gate, a neuron has two rows of `up`. A shared
expert, which computes every token, is dense. On a mesh with an axis `expert`, each device along it has some of the
experts, and a router of its own tokens.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.scipy.special import entr
from jaxtyping import Float, Int32

from sparse_lm import collectives
from sparse_lm.collectives import ONE_DEVICE, Axes, read_replicated
from sparse_lm.config import ModelConfig
from sparse_lm.model import initializers
from sparse_lm.model.ffn import FfnInputs
from sparse_lm.model.linear import exact_linear
from sparse_lm.ops.activations import rows_per_neuron
from sparse_lm.recipes import DENSE, Recipe
from sparse_lm.recipes.differentiable import RESIDUALS
from sparse_lm.recipes.groups import group_by_expert
from sparse_lm.recipes.routing import expert_load

ROUTER, BIAS = "router", "router_bias"  # names of parameters
LOAD, Z_LOSS = "expert_load", "router_z_loss"  # names of statistics
_BIAS_RATE = 4e-3  # how much a bias moves in a step, in units of 1 / E: an even score, where scores are a softmax
_EVEN = 1e-6  # a share of the pairs: less than a single one of up to a million has
_Z_LOSS_WEIGHT = 1e-3  # of the mean over layers, beside the cross entropy


class Mixture(nnx.Module):
    """A router f32[E, D] with its bias f32[E], experts f32[E Fe, D] and perhaps a shared expert f32[Fs, D].

    With a gate, their up projections have twice the rows, as those of `Ffn`.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.router = nnx.Param(initializers.matrix(rngs.params(), config.experts, config.dim))
        self.router_bias = nnx.Param(jnp.zeros(config.experts))
        per_neuron = rows_per_neuron(config.activation)
        self.up = nnx.Param(initializers.matrix(rngs.params(), per_neuron * config.neurons, config.dim))
        keys = jax.random.split(rngs.params(), config.experts)
        down = jax.vmap(lambda key: initializers.residual_matrix(key, config.dim, config.expert_dim, config.layers).T)
        self.down = nnx.Param(down(keys).reshape(-1, config.dim))
        if config.shared_expert_dim:
            width = config.shared_expert_dim
            self.shared_up = nnx.Param(initializers.matrix(rngs.params(), per_neuron * width, config.dim))
            self.shared_down = nnx.Param(
                initializers.residual_matrix(rngs.params(), config.dim, width, config.layers).T
            )

    def __call__(
        self, x: Array, inputs: FfnInputs, *, recipe: Recipe, axes: Axes = ONE_DEVICE
    ) -> tuple[Array, dict[str, Array]]:
        """Computes [T, D] -> [T, D], the experts by the recipe, and statistics.

        The statistics are those of `Recipe.mixture`; "expert_load" f32[E], share of the pairs of tokens and chosen
        experts that each expert has; "largest_router_bias" f32[]; and "router_z_loss" f32[], which alone passes a
        gradient.
        """
        config, experts = self.config, self.config.experts
        router, bias = read_replicated(self.router[...], axes), lax.stop_gradient(self.router_bias[...])
        chosen, gates, z_loss = route(x, router, bias, config.experts_per_token, config.router_scores)
        chosen = collectives.gather(chosen, axes.expert)
        recipe = dataclasses.replace(recipe, activation=config.activation)
        v = recipe.block_of_experts(chosen.size, experts)
        groups = group_by_expert(chosen, experts, v, inputs.order, axes.expert)
        o, stats = recipe.mixture(
            x, self.up[...], self.down[...], gates, groups, inputs.state,
            key=inputs.key, weights=inputs.weights, layer=inputs.layer, axes=axes,
        )  # fmt: skip
        if config.shared_expert_dim:
            dense = dataclasses.replace(DENSE, activation=config.activation, precision=config.precision)
            o += dense.ffn(x, self.shared_up[...], self.shared_down[...], axes=axes)[0]
        load = expert_load(chosen.reshape(-1), experts)
        return o, stats | {LOAD: load, "largest_router_bias": jnp.max(jnp.abs(bias)), Z_LOSS: z_loss}


@jax.named_call
def route(
    x: Float[Array, "T D"], router: Float[Array, "E D"], bias: Float[Array, " E"], choices: int, scores: str
) -> tuple[Int32[Array, "T k"], Float[Array, "T k"], Float[Array, ""]]:
    """Chooses each token's k experts, from that token alone, in float32.

    The bias is added to the scores ("softmax" or "sigmoid") where experts are chosen, and nowhere else.

    Returns:
      The chosen experts, distinct, the best first; gates, in proportion to their scores, which sum to 1; and the
      z-loss. The last two are differentiable.
    """
    logits = checkpoint_name(exact_linear(x, router), RESIDUALS) / math.sqrt(x.shape[-1])
    score = jax.nn.softmax(logits) if scores == "softmax" else jax.nn.sigmoid(logits)
    chosen = checkpoint_name(_largest(lax.stop_gradient(score) + bias, choices), RESIDUALS)
    # Of logarithms, so that scores which are all 0 in float32 have gates, too. Chosen by comparison rather than by
    # index, whose gradient would be scattered.
    log_score = logits if scores == "softmax" else jax.nn.log_sigmoid(logits)
    is_chosen = chosen[:, :, None] == jnp.arange(router.shape[0])
    gates = jax.nn.softmax(jnp.sum(jnp.where(is_chosen, log_score[:, None, :], 0), axis=-1))
    return chosen, gates, jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)))


def _largest(score: Float[Array, "T E"], choices: int) -> Int32[Array, "T k"]:
    """Finds the k largest of each row, the largest first; of equal ones the first. Unlike `top_k` it sorts none."""
    chosen = []
    for _ in range(choices):
        chosen.append(jnp.argmax(score, axis=-1).astype(jnp.int32))
        score = jnp.where(jnp.arange(score.shape[-1]) == chosen[-1][:, None], -jnp.inf, score)
    return jnp.stack(chosen, axis=-1)


def balanced(bias: Float[Array, "L E"], load: Float[Array, "L E"]) -> Float[Array, "L E"]:
    """Moves biases after a step: up for experts that had less than the mean load, down for those that had more.

    New routers score all experts nearly alike, and wide models most of all. A step of many times that difference would
    choose in their place, and send most tokens to the same few.
    """
    missing = jnp.mean(load, axis=-1, keepdims=True) - load
    # Loads that differ by rounding are even, so that the order in which devices add them up moves no bias.
    return bias + _BIAS_RATE / load.shape[-1] * jnp.where(jnp.abs(missing) > _EVEN, jnp.sign(missing), 0)


def load_entropy(load: Float[Array, "L E"]) -> Float[Array, " L"]:
    """Computes the entropy of each layer's load over that of an even load, 1."""
    return jnp.sum(entr(load), axis=-1) / math.log(load.shape[-1])


def auxiliary_loss(stats: dict[str, Array]) -> Array | float:
    """Returns what is added to the cross entropy of a model with these statistics; 0 without a mixture."""
    return _Z_LOSS_WEIGHT * jnp.mean(stats[Z_LOSS]) if Z_LOSS in stats else 0.0
