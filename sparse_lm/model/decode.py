"""Text generation, a token at a time, with a cache of keys and values.

Generation compiles once for each pair of prompt and cache length, and both are rounded up to powers
of two: everything else (the prompt's real length, how many tokens to make, temperature, top-p,
seed) is an input of the compiled function. Evaluation of the FFN is dense.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from sparse_lm.config import ModelConfig
from sparse_lm.model import llama
from sparse_lm.model.attention import KVCache
from sparse_lm.model.sampling import sample

SHORTEST = 32  # prompts and caches are at least this long
NO_TOKEN = -1  # an id that no token has


def generate(
    graphdef: nnx.GraphDef,
    params: llama.Params,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
) -> list[int]:
    """The tokens that a model continues a prompt with.

    Args:
      graphdef, params: the model, as `llama.init` returns it.
      prompt: token ids, at least one.
      max_new_tokens: the most tokens to make.
      temperature: divides the logits; 0 takes the most probable token each time.
      top_p: sample among the most probable tokens that together reach this probability, in (0, 1].
      seed: of the random numbers; the same arguments give the same tokens.
      stop: token id that ends the text, and is not returned.

    Returns:
      The new tokens, at most `max_new_tokens`.

    Raises:
      ValueError: an empty prompt, or an argument out of its range.
    """
    if not len(prompt):
        raise ValueError("the prompt has no tokens; generation needs at least one")
    if temperature < 0 or not 0 < top_p <= 1 or max_new_tokens < 0:
        raise ValueError(
            f"temperature = {temperature} and max_new_tokens = {max_new_tokens} must not be negative, "
            f"top_p = {top_p} must be in (0, 1]"
        )
    length = len(prompt)
    padded = np.zeros(_round_up(length), np.int32)
    padded[:length] = prompt
    scalars = np.int32(length), np.int32(max_new_tokens), np.float32(temperature), np.float32(top_p)
    inputs = jax.device_put((padded, *scalars, np.int32(seed), np.int32(NO_TOKEN if stop is None else stop)))
    tokens, end = jax.device_get(_generate(graphdef, params, *inputs, capacity=_round_up(length + max_new_tokens)))
    return tokens[length:end].tolist()


@functools.partial(jax.jit, static_argnames="capacity")
def _generate(graphdef, params, prompt, length, new_tokens, temperature, top_p, seed, stop, *, capacity):
    """Token buffer int32[capacity], and where in it the text ends."""
    model = llama.merge(graphdef, params)
    key = jax.random.key(seed)

    # What follows the prompt's last token is padding: causality keeps it from the positions that count,
    # and its cache entries are overwritten before they become visible.
    hidden, cache = model.extend(prompt[None], empty_cache(model.config, capacity), jnp.int32(0))
    tokens = jnp.zeros(capacity, jnp.int32).at[: prompt.shape[0]].set(prompt)

    def unfinished(state):
        position, stopped, *_ = state
        return (position < length + new_tokens) & ~stopped

    def step(state):
        position, _, tokens, hidden, cache = state
        token = sample(model.logits(hidden), jax.random.fold_in(key, position), temperature, top_p)
        hidden, cache = model.extend(token[None, None], cache, position)
        stopped = token == stop
        return jnp.where(stopped, position, position + 1), stopped, tokens.at[position].set(token), hidden[0, 0], cache

    state = (length, jnp.array(False), tokens, hidden[0, length - 1], cache)
    end, _, tokens, *_ = lax.while_loop(unfinished, step, state)
    return tokens, end


def empty_cache(config: ModelConfig, capacity: int, batch: int = 1) -> KVCache:
    """Room for `capacity` positions of every layer, [L, B, C, K, H] each."""
    zeros = jnp.zeros((config.layers, batch, capacity, config.kv_heads, config.head_dim), config.dtype)
    return KVCache(zeros, zeros)


def _round_up(length: int) -> int:
    """The next power of two, `SHORTEST` at least."""
    return max(SHORTEST, 1 << (length - 1).bit_length())
