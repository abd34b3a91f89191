"""Shapes of the products that are benchmarked, and random operands."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sparse_lm.ops import hopper, triton
from sparse_lm.ops.formats import Sparse24, SparseVenom

SHAPES_24 = [  # M, N, K
    (8192, 8192, 8192),
    (8192, 16384, 2048),
    (2048, 16384, 8192),
    (16384, 2048, 8192),
    (16384, 16384, 4096),
]
SHAPES_VENOM = [(16384, 8192, 2048), (16384, 16384, 4096)]  # T, F, D
SHAPES_FP8 = [(32768, 2048, 8192), (32768, 2560, 18432)]  # T, D, F of llama1b and AFM-4.5B, 8 sequences of 4096
VENOM_GROUPS = (8, 16, 32)
VENOM_BLOCKS = (64, 128, 256)  # v


class Sliced(NamedTuple):
    """T tokens in blocks of v, each of one of E experts, which have F / E contiguous neurons each."""

    tokens: int
    dim: int
    neurons: int
    experts: int
    v: int

    @property
    def kept(self) -> int:
        """Neurons of a slice."""
        return self.neurons // self.experts


SLICES = [Sliced(16384, 2048, 8192, experts=4, v=256), Sliced(16384, 4096, 16384, experts=4, v=256)]

BACKENDS = dict(hopper=hopper, triton=triton)
KERNELS = dict(
    matmul_24_fp8="matmul_24_fp8",
    masked="sparsify_24_tiles",
    venom="squared_relu_venom",
    e4m3="fp8_rows",
    norms="add_norm",
)
"""A kernel of each table that some backend has none of."""
_VALID_NIBBLES = (4, 8, 12, 9, 13, 14)


def backend(name: str, tables: Sequence[str]) -> types.ModuleType:
    """Returns a backend, or ends the process if it lacks the kernel of a table, or cannot run here."""
    module = BACKENDS[name]
    if lacking := [table for table in tables if KERNELS.get(table, "matmul_24") not in module.__all__]:
        sys.exit(f"--tables: {', '.join(lacking)} must be left out with --backend={name}, which has no such kernels")
    if reason := module.unavailable(jax.devices()[0]):
        sys.exit(f"--backend={name}: {reason}")
    return module


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
    """Draws values at random positions in four random columns of each m, for each v rows; whole tiles."""

    def draw():
        groups = k // m
        order = jnp.argsort(jax.random.uniform(jax.random.key(seed + 1), (rows // v, groups, m)), axis=-1)
        columns = jnp.sort(order[..., :4], axis=-1) + m * jnp.arange(groups)[:, None]
        return columns.reshape(rows // v, 4 * groups).astype(jnp.int32)

    condensed = random_24(rows, 4 * k // m, seed)
    return SparseVenom(condensed.values, condensed.metadata, jax.jit(draw)(), (rows, k), v, m)


def slice_ids(shape: Sliced, seed: int) -> Array:
    """Draws int32 [tokens / v, S], the neurons of each block: blocks sorted by expert, experts of unequal load."""
    load = np.linspace(1.5, 0.5, shape.experts) / shape.experts
    experts = np.sort(np.random.default_rng(seed).choice(shape.experts, shape.tokens // shape.v, p=load))
    return jnp.asarray(shape.kept * experts[:, None] + np.arange(shape.kept), jnp.int32)
