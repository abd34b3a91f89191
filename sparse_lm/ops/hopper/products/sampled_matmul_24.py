"""Multiplies listed rows of a 2:4 matrix by the rows of a dense one, by block, where listed rows are contiguous.

A tile's rows of the sparse operand are boxes that start where the block's list says; the rest is
`matmul_24` with b and the result transposed. The blocks of a cluster compute tiles under one another,
so that they share the tile of tokens, and blocks that run together cover all listed rows of a few
tiles of tokens.

Numerics: as `matmul_24`.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from sparse_lm.ops.checks import product_dtype
from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.hopper.frame import split_k, wgmma_sp
from sparse_lm.ops.hopper.frame.operands import pad, result_type
from sparse_lm.ops.hopper.frame.persistent import multiply
from sparse_lm.ops.hopper.frame.schedule import rows_in_use
from sparse_lm.ops.hopper.frame.store import store_tile
from sparse_lm.ops.hopper.frame.tiling import STEP, Loads, Tiling
from sparse_lm.ops.hopper.products.sampled_rows_24 import sampled_rows_24

# M counts listed rows, N tokens. Times were measured on an H200.
CANDIDATES = Tiling(256, 192, time=1.36), Tiling(128, 256), Tiling(256, 128, time=1.04)


def heuristic_config(tokens: int, kept: int, dim: int, v: int) -> Tiling:
    """Chooses the candidate that is done first, of those whose tiles of tokens lie in one block."""
    fitting = [tiling for tiling in CANDIDATES if v % tiling.tile_n == 0]
    return split_k.fastest(fitting, kept, tokens, pl.cdiv(dim, STEP))


def sampled_matmul_24(
    w: Sparse24,
    x: Array,
    neuron_ids: Array,
    v: int,
    *,
    contiguous: int = 1,
    squared_relu: bool = False,
    out_dtype: DTypeLike | None = None,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.sampled_matmul_24`; refuses dtypes that are no 16-bit floats, and a v that is no multiple of
    64.

    Neurons whose runs no tile here fits are taken one by one (sampled_rows_24.py); `config` is for contiguous ones, and
    its clusters' tiles must lie in one block. Last blocks that list only F cost little if they are contiguous.
    """
    if contiguous % wgmma_sp.ROWS or all(v % tiling.tile_n for tiling in CANDIDATES):
        h = sampled_rows_24(w, x, neuron_ids, v, out_dtype=out_dtype)
        return _squared_relu(h) if squared_relu else h
    tokens, kept = x.shape[0], neuron_ids.shape[1]
    out = result_type(tokens, kept, product_dtype(w, x, out_dtype))
    x = pad(x)
    config = config or heuristic_config(x.shape[0], kept, x.shape[1], v)
    steps = w.values.shape[1] // wgmma_sp.KEPT
    box = math.gcd(contiguous, config.tile_m)

    def in_use(operands, _, token):
        return token < operands[-1][0]

    def loads(operands, job):
        values, metadata, x, neuron_ids, _ = operands
        block = lax.div(job.column, v)
        firsts = range(0, config.tile_m, box)
        boxes = [(first, neuron_ids[block, lax.min(job.row + first, kept - box)]) for first in firsts]

        def copies(k, _, stage):
            of_boxes = (stage.copy_sparse(values, metadata, row, k, first, box) for first, row in boxes)
            return [*itertools.chain(*of_boxes), stage.copy_b(x, job.column, k * STEP)]

        return Loads(copies)

    def store_activated(part, slots, _, out_gmem, origin, number):
        store_tile(_squared_relu(part), slots, out_gmem, origin, first_store=number, transposed=True)

    schedule = split_k.schedule_product(config, kept, x.shape[0], steps, in_use)
    padding = rows_in_use(neuron_ids[:, ::contiguous], v, w.shape[0])
    operands = w.values, w.metadata, x, neuron_ids, padding
    options: dict[str, Any] = dict(
        b_transposed=True, out_transposed=True, store=store_activated if squared_relu else None
    )
    product = multiply(config, schedule, loads, operands, out, name="sampled_matmul_24", **options)
    return product[:tokens, :kept]


def _squared_relu(h: Array) -> Array:
    return jnp.square(jnp.maximum(h, 0))
