"""Text generation, a token at a time, with a cache of keys and values.

Generation compiles once for each number of prompts and pair of prompt and cache length, and both
lengths are rounded up to powers of two: everything else (the prompts' real lengths, how many tokens to
make, temperature, top-p, seeds) is an input of the compiled function.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from sparse_lm.config import ModelConfig
from sparse_lm.model import llama
from sparse_lm.model.attention import KVCache
from sparse_lm.recipes import DENSE, Recipe

SHORTEST = 32  # prompts and caches are at least this long
NO_TOKEN = -1  # an id that no token has
MOST = 2**30  # tokens to make, so that positions stay int32


def generate(
    graphdef: nnx.GraphDef,
    params: llama.Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seeds: Sequence[int] | None = None,
    stop: int | None = None,
    recipe: Recipe = DENSE,
    recipe_state: Any = None,
    dense_layers: int = 0,
) -> list[list[int]]:
    """Continues prompts, each as it would be continued alone, until every text has stopped or is long enough.

    Args:
      graphdef, params: the model, as `llama.init` returns it.
      prompts: token ids, at least one each; each prompt takes the memory of the longest.
      temperature: divides the logits; 0 takes the most probable token each time.
      top_p: sample among the most probable tokens that together reach this probability, in (0, 1].
      seeds: of the random numbers of each prompt, in 0..2^32 - 1, 0 by default; the same give the same tokens.
      stop: token id that ends a text, and is not returned.
      recipe, recipe_state, dense_layers: compute the FFNs, as arguments of `Llama`.

    Returns:
      The new tokens of each prompt, at most `max_new_tokens`.

    Raises:
      ValueError: an empty prompt, a token that the model has not, or another argument than seeds out of its range.
      OverflowError: a seed out of its range.
    """
    seeds = [0] * len(prompts) if seeds is None else seeds
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    if not lengths.all():
        raise ValueError("the prompt has no tokens; generation needs at least one")
    if not temperature >= 0 or not 0 < top_p <= 1 or not 0 <= max_new_tokens <= MOST:
        raise ValueError(
            f"temperature = {temperature} must be 0 or more, top_p = {top_p} in (0, 1], "
            f"max_new_tokens = {max_new_tokens} in 0..{MOST}"
        )
    if not len(prompts):
        return []
    tokens, vocabulary = np.concatenate(prompts), params["embed"]["embedding"].shape[0]
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValueError(f"prompts have tokens {tokens.min()} to {tokens.max()}: must be in 0..{vocabulary - 1}")
    longest = int(lengths.max())
    padded = np.zeros((len(prompts), round_up(longest)), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    scalars = np.int32(max_new_tokens), np.float32(temperature), np.float32(top_p)
    inputs = jax.device_put(
        (padded, lengths, *scalars, np.asarray(seeds, np.uint32), np.int32(NO_TOKEN if stop is None else stop))
    )
    # In evaluation a token decides alone, and no kernel takes so few.
    recipe = dataclasses.replace(recipe.for_evaluation(), implementation=None)
    static = dict(recipe=recipe, dense_layers=dense_layers, capacity=round_up(longest + max_new_tokens))
    made, counts = jax.device_get(_generate(graphdef, params, recipe_state, *inputs, **static))
    return [row[:count].tolist() for row, count in zip(made, counts, strict=True)]


@functools.partial(jax.jit, static_argnames=("recipe", "dense_layers", "capacity"))
def _generate(
    graphdef, params, recipe_state, prompts, lengths, new_tokens, temperature, top_p, seeds, stop, *, recipe,
    dense_layers, capacity,
):  # fmt: skip
    """Generates tokens int32[B, capacity], and how many of each row count, int32[B]."""
    model = llama.merge(graphdef, params)
    batch = prompts.shape[0]
    keys = jax.vmap(jax.random.key)(seeds)
    weights = model.prepare_weights(recipe, recipe_state)
    ffns = dict(recipe=recipe, recipe_state=recipe_state, weights=weights, dense_layers=dense_layers)

    # What follows a prompt's last token is padding: causality keeps it from the positions that count,
    # and its cache entries are overwritten before they become visible.
    hidden, cache = model.extend(prompts, empty_cache(model.config, capacity, batch), jnp.int32(0), **ffns)
    last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[:, 0]  # [B, D]

    @functools.partial(jax.vmap, in_axes=(0, 1, 0), out_axes=(0, 1))
    def extend(token, cache, position):
        """Computes the next positions; rows are at positions of their own."""
        cache = jax.tree.map(lambda c: c[:, None], cache)
        hidden, cache = model.extend(token[None, None], cache, position, **ffns)
        return hidden[0, 0], jax.tree.map(lambda c: c[:, 0], cache)

    def unfinished(state):
        index, stopped, *_ = state
        return (index < new_tokens) & ~jnp.all(stopped)

    def step(state):
        index, stopped, counts, made, hidden, cache = state
        positions = lengths + index
        tokens = jax.vmap(sample, in_axes=(0, 0, None, None))(
            model.logits(hidden), jax.vmap(jax.random.fold_in)(keys, positions), temperature, top_p
        )
        stopped |= tokens == stop
        hidden, cache = extend(tokens, cache, positions)
        return index + 1, stopped, counts + ~stopped, made.at[:, index].set(tokens), hidden, cache

    rows = jnp.zeros(batch, jnp.int32)
    state = (jnp.int32(0), rows > 0, rows, jnp.zeros((batch, capacity), jnp.int32), last, cache)
    _, _, counts, made, *_ = lax.while_loop(unfinished, step, state)
    return made, counts


def empty_cache(config: ModelConfig, capacity: int, batch: int) -> KVCache:
    """Makes room for `capacity` positions of every layer, [L, B, C, K, H] each."""
    zeros = jnp.zeros((config.layers, batch, capacity, config.kv_heads, config.head_width), config.dtype)
    return KVCache(zeros, zeros)


def round_up(length: int) -> int:
    """Returns the next power of two, `SHORTEST` at least: the lengths that generation compiles for."""
    return max(SHORTEST, 1 << (length - 1).bit_length())


def sample(logits: Array, key: Array, temperature: Array, top_p: Array) -> Array:
    """Draws one token, int32[], from logits f32[V], by `keep_top_p`; temperature 0 takes the most probable one."""

    def draw() -> Array:
        # No quotient is over 0: those of a small temperature would overflow, and their softmax be NaN.
        scaled = (logits - jnp.max(logits)) / temperature
        return jax.random.categorical(key, keep_top_p(scaled, top_p)).astype(jnp.int32)

    # A branch, not a choice between two results: drawing sorts the vocabulary.
    return lax.cond(temperature > 0, draw, lambda: jnp.argmax(logits).astype(jnp.int32))


def keep_top_p(logits: Array, top_p: Array) -> Array:
    """Nucleus filter (1904.09751): logits f32[V] with -inf outside the nucleus.

    The nucleus is the smallest set of most probable tokens whose probabilities reach `top_p`. Of
    equally probable tokens the lower ones enter first.
    """
    order = jnp.argsort(logits, descending=True, stable=True)
    probabilities = jax.nn.softmax(logits[order])
    mass_before = jnp.cumsum(probabilities) - probabilities
    # The most probable token stays whatever rounding does; with top_p = 1 so do all.
    kept = (mass_before < top_p).at[0].set(True) | (top_p >= 1)
    return jnp.where(jnp.zeros_like(kept).at[order].set(kept), logits, -jnp.inf)
