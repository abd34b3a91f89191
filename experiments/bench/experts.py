"""Times a mixture's experts by recipe against dense grouped products, in one process, forward and with backward.

    python -m experiments.bench.experts --output=experiments/results/experts_h200.json
    python -m experiments.bench.experts --skews=0 --tokens=8192,16384 --output=...

Kernel times of all that a layer does with its experts: weights to their sparse forms, dispatch, products, selection,
combining. Routing is given. The float32 weights are read once, as in a step, and gradients are in the inputs' dtype.
Tokens choose distinct experts at random, in proportion to exp(skew * normal): with a skew of 0 loads are as even as
chance has them, and each row says what the busiest and the idlest expert have, in even shares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import Array

from experiments.bench.layers import lower, time_layers
from experiments.kernels.operands import random_matrix
from experiments.result_files import write_results
from sparse_lm.recipes import RECIPES, Recipe
from sparse_lm.recipes.groups import group_by_expert

SHAPE = dict(dim=2048, experts=16, expert_dim=4096, choices=4)  # of configs/moe_1b.py
NAMES = ("dense", "experts24")


class Operands(NamedTuple):
    """Holds what a mixture's experts read, whatever the recipe."""

    x: Array
    w1: Array
    w2: Array
    gates: Array
    chosen: Array
    order: Array
    key: Array
    do: Array


def random_operands(
    tokens: int, dim: int, experts: int, expert_dim: int, choices: int, skew: float, dtype: Any = jnp.bfloat16
) -> Operands:
    """Draws normal inputs and gradients, float32 weights of the size that training starts with, and choices."""
    propensities = skew * jax.random.normal(jax.random.key(8), (experts,))
    drawn = propensities + jax.random.gumbel(jax.random.key(9), (tokens, experts))
    w1, w2 = (random_matrix(experts * expert_dim, dim, seed, jnp.float32) for seed in (4, 5))
    x, do = (random_matrix(tokens, dim, seed, dtype) for seed in (2, 3))
    gates, chosen = jnp.full((tokens, choices), 1 / choices), jax.lax.top_k(drawn, choices)[1]
    order = jax.random.permutation(jax.random.key(6), tokens)
    return Operands(x, w1 / dim**0.5, w2 / expert_dim**0.5, gates, chosen, order, jax.random.key(7), do)


def experts_of(
    recipe: Recipe, experts: int, operands: Operands, state: Any
) -> tuple[Callable[..., Array], tuple[Array, ...]]:
    """Returns the experts as a function of what has gradients, and that; weights are prepared once, as in a step."""
    x, w1, w2, gates, chosen, order, key, _ = operands
    masters = jax.tree.map(lambda a: a[None], (w1, w2, state))
    weights = recipe.prepare(*masters, x.dtype) if recipe.sparse_weights else None
    v = recipe.block_of_experts(chosen.size, experts)
    groups = group_by_expert(chosen, experts, v, order if recipe.takes_order else None)

    def function(x: Array, w1: Array, w2: Array, gates: Array) -> Array:
        return recipe.mixture(x, w1, w2, gates, groups, state, key=key, weights=weights)[0]

    return function, (x, w1.astype(x.dtype), w2.astype(x.dtype), gates)


def loads(chosen: Array, experts: int) -> dict[str, float]:
    """Returns what the busiest and the idlest expert have, in even shares."""
    shares = jnp.bincount(chosen.reshape(-1), length=experts) * experts / chosen.size
    return dict(busiest=float(shares.max()), idlest=float(shares.min()))


def main(_) -> None:
    table: list[dict[str, Any]] = []
    for tokens in map(int, flags.FLAGS.tokens):
        for skew in map(float, flags.FLAGS.skews):
            operands = random_operands(tokens, **SHAPE, skew=skew)
            about = dict(tokens=tokens, **SHAPE, skew=skew, **loads(operands.chosen, SHAPE["experts"]))
            print(about, flush=True)
            layers = {}
            for name in NAMES:
                recipe = RECIPES[name]()
                state, _ = jax.jit(recipe.enter)(operands.w1, operands.w2)
                layers[name] = lower(functools.partial(experts_of, recipe, SHAPE["experts"]), operands, state)
            table += [dict(recipe=name, **about, **row) for name, row in time_layers(layers).items()]
            write_results(experts=table)


if __name__ == "__main__":
    flags.DEFINE_list("tokens", ["8192"], "Tokens, T.")
    flags.DEFINE_list("skews", ["0", "0.2", "0.5"], "How uneven loads are: standard deviation of the log propensities.")
    app.run(main)
