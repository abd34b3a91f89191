"""Gives kernel benchmarks what they share: kernel times, and random operands."""

from __future__ import annotations

import collections
import re
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import profiler

from experiments.kernels.shapes import Sliced
from sparse_lm.ops.formats import Sparse24, SparseVenom

_VALID_NIBBLES = (4, 8, 12, 9, 13, 14)


def median_ms(
    function: Callable, *args: Any, iterations: int = 15, compiler_options: dict[str, Any] | None = None
) -> float:
    """Returns the median time of all kernels that one call of the compiled function launches (CUPTI), in ms."""
    compiled = jax.jit(function, compiler_options=compiler_options)
    jax.block_until_ready(compiled(*args))
    _, times = profiler.measure(compiled, iterations=iterations)(*args)
    return statistics.median(times)


def time_by_kernel(compiled: jax.stages.Compiled, *operands: Any) -> tuple[float, dict[str, float]]:
    """Returns median milliseconds of all kernels, and by kernel name, without numbers and what takes under 1 us."""
    _, runs = profiler.measure(compiled, iterations=15, aggregate=False)(*operands)
    total = statistics.median(sum(ms for _, ms in run) for run in runs)
    by_name: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * len(runs))
    for i, run in enumerate(runs):
        for name, ms in run:
            by_name[re.sub(r"_\d+|\d+$", "", name)][i] += ms
    medians = {name: statistics.median(times) for name, times in by_name.items()}
    largest_first = sorted(medians.items(), key=lambda item: -item[1])
    return total, {name: round(ms, 4) for name, ms in largest_first if ms >= 1e-3}


def random_matrix(rows: int, columns: int, seed: int, dtype=jnp.bfloat16) -> Array:
    """Draws [rows, columns] of standard normal numbers."""
    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), (rows, columns), dtype))()


def random_24(m: int, k: int, seed: int) -> Sparse24:
    """Draws values at random positions; m and k are multiples of 64."""

    def draw():
        keys = jax.random.split(jax.random.key(seed))
        values = jax.random.normal(keys[0], (m, k // 2), jnp.bfloat16)
        nibbles = jax.random.choice(keys[1], jnp.array(_VALID_NIBBLES, jnp.uint32), (m // 64, k // 64, 128, 8))
        words = jnp.sum(nibbles << (4 * jnp.arange(8, dtype=jnp.uint32)), axis=-1, dtype=jnp.uint32)
        return Sparse24(values, jax.lax.bitcast_convert_type(words, jnp.int32), (m, k))

    return jax.jit(draw)()


def random_venom(rows: int, k: int, v: int, m: int, seed: int) -> SparseVenom:
    """Draws values at random columns and positions; whole tiles."""
    condensed = random_24(rows, 4 * k // m, seed)
    return SparseVenom(condensed.values, condensed.metadata, random_columns(rows, k, v, m, seed + 1), (rows, k), v, m)


def random_columns(rows: int, k: int, v: int, m: int, seed: int) -> Array:
    """Draws int32 [rows / v, 4 k / m]: four of each m columns for each v rows."""

    def draw():
        groups = k // m
        order = jnp.argsort(jax.random.uniform(jax.random.key(seed), (rows // v, groups, m)), axis=-1)
        columns = jnp.sort(order[..., :4], axis=-1) + m * jnp.arange(groups)[:, None]
        return columns.reshape(rows // v, 4 * groups).astype(jnp.int32)

    return jax.jit(draw)()


def slice_ids(shape: Sliced, seed: int) -> Array:
    """Draws int32 [tokens / v, S], the neurons of each block: blocks sorted by expert, experts of unequal load."""
    load = np.linspace(1.5, 0.5, shape.experts) / shape.experts
    experts = np.sort(np.random.default_rng(seed).choice(shape.experts, shape.tokens // shape.v, p=load))
    return jnp.asarray(shape.kept * experts[:, None] + np.arange(shape.kept), jnp.int32)
