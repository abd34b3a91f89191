"""Times a mixture's experts by recipe against dense grouped products, in one process, forward and with backward.

    python -m experiments.bench.experts --output=experiments/results/experts_h200.json
    python -m experiments.bench.experts --skews=0 --recipes=dense,experts24 --tokens=8192,16384 --output=...

Kernel times of all that a layer does with its experts: weights to their sparse forms, dispatch, products, selection,
combining. Routing is given. The float32 weights are read once, as in a step, and gradients are in the inputs' dtype.
Tokens choose distinct experts at random, in proportion to exp(skew * normal): with a skew of 0 loads are as even as
chance has them, and each row says what the busiest and the idlest expert have, in even shares.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import Array

from experiments.kernels.timing import random_matrix, time_by_kernel
from experiments.result_files import write_results
from sparse_lm.ops import backends
from sparse_lm.recipes import RECIPES, Recipe
from sparse_lm.recipes.groups import group_by_expert

OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)
TOKENS = flags.DEFINE_list("tokens", ["8192"], "Tokens, T.")
DIM = flags.DEFINE_integer("dim", 2048, "Model width, D.")
EXPERTS = flags.DEFINE_integer("experts", 16, "Experts, E.")
WIDTH = flags.DEFINE_integer("expert_dim", 4096, "Neurons of an expert.")
CHOICES = flags.DEFINE_integer("experts_per_token", 4, "Experts of a token, k.")
SKEWS = flags.DEFINE_list(
    "skews", ["0", "0.2", "0.5"], "How uneven loads are: standard deviation of the log propensities."
)
NAMES = flags.DEFINE_list("recipes", ["dense", "experts24"], "Recipes that compute experts, dense first.")
PARTS = ("forward", "both")


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
    tokens: int, dim: int, experts: int, width: int, choices: int, skew: float, dtype: Any = jnp.bfloat16
) -> Operands:
    """Draws normal inputs and gradients, float32 weights of the size that training starts with, and choices."""
    propensities = skew * jax.random.normal(jax.random.key(8), (experts,))
    drawn = propensities + jax.random.gumbel(jax.random.key(9), (tokens, experts))
    w1, w2 = (random_matrix(experts * width, dim, seed, jnp.float32) for seed in (4, 5))
    return Operands(
        x=random_matrix(tokens, dim, 2, dtype),
        w1=w1 / dim**0.5,
        w2=w2 / width**0.5,
        gates=jnp.full((tokens, choices), 1 / choices),
        chosen=jax.lax.top_k(drawn, choices)[1],
        order=jax.random.permutation(jax.random.key(6), tokens),
        key=jax.random.key(7),
        do=random_matrix(tokens, dim, 3, dtype),
    )


def forward(recipe: Recipe, experts: int, operands: Operands, state: Any) -> Array:
    """Computes the output [T, D]."""
    function, differentiated = _experts(recipe, experts, operands, state)
    return function(*differentiated)


def both(recipe: Recipe, experts: int, operands: Operands, state: Any) -> tuple[Array, ...]:
    """Computes the output, and the gradients of x, of the weights and of the gates."""
    function, differentiated = _experts(recipe, experts, operands, state)
    o, vjp = jax.vjp(function, *differentiated)
    return o, *vjp(operands.do)


def _experts(recipe: Recipe, experts: int, operands: Operands, state: Any) -> tuple[Any, tuple[Array, ...]]:
    """Returns the experts as a function of what has gradients, and that; weights are prepared once, as in a step."""
    x, w1, w2, gates, chosen, order, key, _ = operands
    masters = jax.tree.map(lambda a: a[None], (w1, w2, state))
    weights = recipe.prepare(*masters, x.dtype) if recipe.sparse_weights else None
    v = recipe.block_of_experts(chosen.size, experts)
    groups = group_by_expert(chosen, experts, v, order if recipe.takes_order else None)

    def function(x: Array, w1: Array, w2: Array, gates: Array) -> Array:
        return recipe.mixture(x, w1, w2, gates, groups, state, key=key, weights=weights)[0]

    return function, (x, w1.astype(x.dtype), w2.astype(x.dtype), gates)


def bench(recipe: Recipe, experts: int, operands: Operands) -> dict[str, Any]:
    """Times a recipe: milliseconds forward and with backward, and of the latter by kernel."""
    state, _ = jax.jit(recipe.enter)(operands.w1, operands.w2)
    with backends.record() as used:
        lowered = [jax.jit(functools.partial(part, recipe, experts)).lower(operands, state) for part in (forward, both)]
    compiled = [part.compile() for part in lowered]
    (forward_ms, _), (both_ms, kernels) = (time_by_kernel(part, operands, state) for part in compiled)
    reference_ops = sorted(op for op, names in used.items() if "reference" in names)
    return dict(forward_ms=forward_ms, both_ms=both_ms, reference_ops=reference_ops, kernels=kernels)


def loads(chosen: Array, experts: int) -> dict[str, float]:
    """Returns what the busiest and the idlest expert have, in even shares."""
    shares = jnp.bincount(chosen.reshape(-1), length=experts) * experts / chosen.size
    return dict(busiest=float(shares.max()), idlest=float(shares.min()))


def main(_) -> None:
    able = [name for name, recipe in RECIPES.items() if "experts" in recipe.computes]
    if unknown := set(NAMES.value) - set(able):
        raise app.UsageError(f"--recipes: {sorted(unknown)} must be among {able}")
    experts, sizes = EXPERTS.value, (DIM.value, EXPERTS.value, WIDTH.value, CHOICES.value)
    table = []
    for tokens in map(int, TOKENS.value):
        for skew in map(float, SKEWS.value):
            operands = random_operands(tokens, *sizes, skew)
            shape = dict(tokens=tokens, **dict(zip(("dim", "experts", "expert_dim", "choices"), sizes, strict=True)))
            shape |= dict(skew=skew, **loads(operands.chosen, experts))
            print(" ".join(f"{name}={value:g}" for name, value in shape.items()), flush=True)
            rows = {name: bench(RECIPES[name](), experts, operands) for name in NAMES.value}
            for name, row in rows.items():
                if "dense" in rows and name != "dense":
                    row |= {f"{part}_speedup": rows["dense"][f"{part}_ms"] / row[f"{part}_ms"] for part in PARTS}
                table.append(dict(recipe=name, **shape, **row))
                print(
                    f"  {name:<12} forward {row['forward_ms']:.3f} ms x{row.get('forward_speedup', 1):.2f}, "
                    f"with backward {row['both_ms']:.3f} ms x{row.get('both_speedup', 1):.2f} "
                    f"{row['reference_ops'] or ''}",
                    flush=True,
                )
            write_results(OUTPUT.value, dict(experts=table))


if __name__ == "__main__":
    app.run(main)
