"""FFNs small enough to compile each recipe on a CPU, and their inputs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lm import ops, recipes
from sparse_lm.ops.activations import GATES
from sparse_lm.recipes import Act24, Dense, DenseSlices, Fst, Slices, SSte, Venom
from tests.ops.numpy_fp8 import rounded, sum_over_rows
from tests.ops.operands import assert_errors_are_as_small
from tests.recipes import masked_dense_ffn as dense64

TOKENS, DIM, NEURONS = 96, 24, 160
RECIPES = {
    "dense": Dense(),
    "fst": Fst(mask_decay=0.5),
    "sste": SSte(),
    "act24": Act24(),
    "venom": Venom(v=32, m=8, experts=5),
    "slices": Slices(v=16, m=16),
    "dense_slices": DenseSlices(v=16, m=16),
}
"""Every recipe of FFNs, with knobs that fit; experts have numbers of tokens that no block divides."""
OF_FFNS = {name: recipe for name, recipe in recipes.RECIPES.items() if "squared_relu" in recipe.computes}
GATED = {
    f"{name}, {activation}": dataclasses.replace(recipe, activation=activation)
    for name, recipe in RECIPES.items()
    for activation in GATES
    if activation in recipe.computes
}
KEY = jax.random.key(1)


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def random_bf16(*scales_and_shapes):
    """Random float32 arrays that bfloat16 holds exactly."""
    return [
        (scale * random(seed, *shape)).astype(jnp.bfloat16).astype(jnp.float32)
        for seed, (scale, *shape) in enumerate(scales_and_shapes)
    ]


X, DO = random(0, TOKENS, DIM), random(3, TOKENS, DIM)
W1, W2 = random(1, NEURONS, DIM) / 4, random(2, NEURONS, DIM) / 8
GATED_W1 = random(7, 2 * NEURONS, DIM) / 4
ORDER = jnp.asarray(np.random.default_rng(4).permutation(TOKENS), jnp.int32)
INPUTS = dense64.Inputs(*(np.asarray(a, np.float64) for a in (X, W1, W2, DO)), order=np.asarray(ORDER))


def w1_of(recipe):
    return GATED_W1 if recipe.activation in GATES else W1


@functools.cache
def state_of(recipe):
    """A state with scales and centroids that `enter` would not choose; masks that it would."""
    w1 = w1_of(recipe)
    state = recipe.init_state(w1, W2)
    values = {
        "mask_up": lambda _: ops.transposable_mask(w1),
        "mask_down": lambda _: ops.transposable_mask(W2),
        "decay": lambda _: jnp.float32(0.5),
        "scale_up": lambda _: jnp.float32(1.4),
        "scale_down": lambda _: jnp.float32(1.3),
        "centroids": lambda a: random(5, *a.shape),
    }
    return type(state)(*(values[name](getattr(state, name)) for name in state._fields))


@jax.jit
def _draw(a, key):
    return ops.sparsify_24(a, "mvue", 0, key=key).to_dense().T


def draw(a, use):
    """The estimate of a [T, K] that a recipe draws with `KEY` for one of its uses."""
    return np.asarray(_draw(jnp.asarray(a, jnp.float32), jax.random.fold_in(KEY, use)), np.float64)


def expected(recipe, draw, **inputs):
    """Computes what a recipe's formulas say for its state of above."""
    state, knobs = state_of(recipe), {}
    w1 = np.asarray(w1_of(recipe), np.float64)
    inputs = dataclasses.replace(INPUTS, w1=w1, activation=recipe.activation, **inputs)
    if recipe.name == "dense" and recipe.precision == "fp8":
        knobs = dict(rounded=rounded, weight_gradient=sum_over_rows)
    elif recipe.name == "fst":
        knobs = dict(masks=(np.asarray(state.mask_up), np.asarray(state.mask_down)))
    elif recipe.name == "act24":
        knobs = dict(dense_features=recipe.dense_features, rounded=rounded if recipe.precision == "fp8" else None)
    elif scales := [float(value) for name, value in state._asdict().items() if name.startswith("scale_")]:
        knobs = dict(scales=scales)
    if recipe.name in ("venom", "slices", "dense_slices"):
        knobs |= dict(centroids=np.asarray(state.centroids, np.float64), m=recipe.m)
    if recipe.name in ("venom", "slices"):
        knobs["v"] = recipe.v
    if recipe.name in ("slices", "dense_slices"):
        knobs["parts"] = recipe.shards
    return getattr(dense64, recipe.name)(inputs, draw=draw, **knobs)


def assert_best_is_as_accurate_as_the_reference(recipe, run):
    """Whichever kernels run in bf16 on a GPU err at most 1.5 times as much as the reference, against float32.

    Args:
      recipe: whose best implementation is tested.
      run: a function of the recipe and a dtype, in which it computes outputs and gradients.
    """

    def compute(dtype, implementation):
        with jax.default_matmul_precision("highest"):
            return run(dataclasses.replace(recipe, implementation=implementation), dtype)

    best, reference = (compute(jnp.bfloat16, name) for name in (None, "reference"))
    assert_errors_are_as_small(best, reference, compute(jnp.float32, "reference"))


@functools.cache
def outputs_and_gradients(recipe):
    """A compiled function of x, w1, w2, dO, state, key, order and prepared weights: (O, dX, dW1, dW2, statistics)."""

    @jax.jit
    def run(x, w1, w2, do, state, key, order, **prepared):
        f = lambda x, w1, w2: recipe.ffn(x, w1, w2, state, key=key, order=order, **prepared)  # noqa: E731
        o, vjp, stats = jax.vjp(f, x, w1, w2, has_aux=True)
        return *(o, *vjp(do)), stats

    return run


def among_layers(recipe, w1, w2, state):
    """The prepared weights of three layers, of which those given are the second's."""
    w1, w2 = (jnp.stack([-2 * w, w, 3 * w]) for w in (w1, w2))
    states = jax.tree.map(lambda a: jnp.stack([~a, a, a] if a.dtype == bool else [2 * a, a, -a]), state)
    return dict(weights=jax.jit(recipe.prepare, static_argnums=3)(w1, w2, states, jnp.float32), layer=1)


@functools.cache
def output(recipe):
    """A compiled function of x, w1, w2 and state: O alone, with nothing random."""
    return jax.jit(lambda x, w1, w2, state: recipe.ffn(x, w1, w2, state)[0])
