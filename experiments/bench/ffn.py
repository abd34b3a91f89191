"""Times one FFN by recipe against the dense one, in one process: forward, and forward with backward.

    python -m experiments.bench.ffn --output=experiments/results/ffn_h200.json
    python -m experiments.bench.ffn --recipes='slices 2:16' --imbalance=1,1.76 --output=...
    python -m experiments.bench.ffn --recipes='act24,dense fp8,act24 fp8' --output=...
    python -m experiments.bench.ffn --activation=swiglu --tokens=16384 --output=experiments/results/ffn_swiglu_h200.json

Kernel times, everything that a layer does included: weights to their sparse forms, routing, dispatch, selection. The
random order of the tokens, which all layers of a step share, is given. `--imbalance` is what the busiest expert has of
an even share: 0.28 to 0.44 of the tokens in trained models with 4 experts are 1.12 to 1.76.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import Array
from jax.typing import DTypeLike

from experiments.bench.layers import Layer, lower, time_layers
from experiments.kernels.operands import random_matrix
from experiments.result_files import write_results
from sparse_lm.model.linear import compiler_options
from sparse_lm.ops import fp8
from sparse_lm.ops.activations import ACTIVATIONS, SQUARED_RELU, rows_per_neuron
from sparse_lm.recipes import Act24, Dense, DenseSlices, Fst, Recipe, Slices, SSte, Venom

RECIPES: dict[str, Recipe] = {
    "act24": Act24(),
    "fst": Fst(),
    "sste": SSte(),
    "venom 128:2:16": Venom(v=128, m=16),
    "slices 2:16": Slices(),
    "dense slices 1:4": DenseSlices(),
    "dense fp8": Dense(precision=fp8.PRECISION),
    "act24 fp8": Act24(precision=fp8.PRECISION),
}


class Operands(NamedTuple):
    """Holds what one FFN reads, whatever its recipe."""

    x: Array
    w1: Array
    w2: Array
    key: Array
    order: Array
    do: Array  # gradient of the output


def recipes_of(activation: str, names: Sequence[str] = ()) -> dict[str, Recipe]:
    """Returns dense and the recipes of these names that compute an activation; all that do if none are named.

    Raises:
      UsageError: a name that is none, or one of a recipe that does not compute the activation.
    """
    able = {name: recipe for name, recipe in RECIPES.items() if activation in recipe.computes}
    if unknown := set(names) - {"dense", *able}:
        raise app.UsageError(f"--recipes: {sorted(unknown)} must be among {list(able)} with --activation={activation}")
    chosen = {"dense": Dense()} | {name: recipe for name, recipe in able.items() if name in (names or able)}
    return {name: dataclasses.replace(recipe, activation=activation) for name, recipe in chosen.items()}


def random_operands(
    tokens: int, dim: int, neurons: int, dtype: DTypeLike = jnp.bfloat16, activation: str = SQUARED_RELU
) -> Operands:
    """Draws normal inputs and gradients; float32 weights of the size that training starts with."""
    w1 = random_matrix(rows_per_neuron(activation) * neurons, dim, 4, jnp.float32) / dim**0.5
    w2 = random_matrix(neurons, dim, 5, jnp.float32) / neurons**0.5
    x, do = (random_matrix(tokens, dim, seed, dtype) for seed in (2, 3))
    return Operands(x, w1, w2, jax.random.key(7), jax.random.permutation(jax.random.key(6), tokens), do)


def sparse_phase(recipe: Recipe, operands: Operands, imbalance: float) -> tuple[Operands, Any]:
    """Enters the sparse phase; tokens are moved towards random centroids, more of them towards the first.

    Returns:
      The operands and the recipe's state.
    """
    state, _ = jax.jit(recipe.enter)(operands.w1, operands.w2, operands.x[:4096])
    if "centroids" not in getattr(state, "_fields", ()):
        return operands, state
    experts, dim = state.centroids.shape
    centroids = jax.random.normal(jax.random.key(1), (experts, dim))
    busiest = imbalance / experts
    loads = jnp.full(experts, (1 - busiest) / (experts - 1)).at[0].set(busiest)
    expert = jax.random.choice(jax.random.key(8), experts, operands.x.shape[:1], p=loads)
    towards = centroids / jnp.linalg.norm(centroids, axis=-1, keepdims=True)
    x = operands.x + 10 * towards[expert].astype(operands.x.dtype)  # ten deviations along the centroid
    return operands._replace(x=x), state._replace(centroids=centroids)


def ffn(recipe: Recipe, operands: Operands, state: Any) -> tuple[Callable[..., Array], tuple[Array, ...]]:
    """Returns the FFN as a function of what has gradients, and that; weights are prepared once, as in a step."""
    of_all_layers = jax.tree.map(lambda a: a[None], (operands.w1, operands.w2, state))
    weights = recipe.prepare(*of_all_layers, operands.x.dtype)
    order = operands.order if recipe.takes_order else None

    def function(x: Array, w1: Array, w2: Array) -> Array:
        return recipe.ffn(x, w1, w2, state, key=operands.key, order=order, weights=weights)[0]

    return function, (operands.x, operands.w1, operands.w2)


def lower_ffn(recipe: Recipe, operands: Operands, imbalance: float = 1.0) -> Layer:
    """Traces a recipe's FFN for operands of these shapes."""
    operands, state = sparse_phase(recipe, operands, imbalance)
    return lower(functools.partial(ffn, recipe), operands, state, compiler_options(recipe.precision))


def main(_) -> None:
    values, table = flags.FLAGS, []
    recipes = recipes_of(values.activation, values.recipes)
    cases = itertools.product(values.shapes, map(int, values.tokens), map(float, values.imbalance))
    for shape, tokens, imbalance in cases:
        dim, neurons = map(int, shape.split("x"))
        about = dict(activation=values.activation, tokens=tokens, dim=dim, neurons=neurons, imbalance=imbalance)
        print(about, flush=True)
        operands = random_operands(tokens, dim, neurons, activation=values.activation)
        rows = time_layers({name: lower_ffn(recipe, operands, imbalance) for name, recipe in recipes.items()})
        table += [dict(recipe=name, **about, **row) for name, row in rows.items()]
        write_results(ffn=table)


if __name__ == "__main__":
    flags.DEFINE_list("tokens", ["8192", "16384", "32768", "65536"], "Tokens, T.")
    flags.register_validator("tokens", lambda tokens: all(map(str.isdecimal, tokens)), "must be whole numbers")
    flags.DEFINE_list("shapes", ["2048x8192", "4096x16384"], "Model width x neurons.")
    of_shape = re.compile(r"\d+x\d+")
    flags.register_validator("shapes", lambda shapes: all(map(of_shape.fullmatch, shapes)), "must be like 2048x8192")
    flags.DEFINE_enum("activation", SQUARED_RELU, ACTIVATIONS, "Of the hidden layer.")
    flags.DEFINE_list("recipes", [], "Names of recipes, beside dense; by default all that compute the activation.")
    flags.DEFINE_list("imbalance", ["1"], "Tokens of the busiest expert, in even shares.")
    app.run(main)
