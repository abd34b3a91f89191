"""Listed rows of a 2:4 matrix times the rows of a dense one, block by block, where listed rows are contiguous.

A tile's rows of the sparse operand are boxes that start where the block's list says; the rest is
`matmul_24` with b and the result transposed. The blocks of a cluster compute tiles under one another,
so that they share the tile of tokens, and blocks that run together cover all listed rows of a few
tiles of tokens.

Numerics: as `matmul_24`.
"""

from __future__ import annotations

import itertools
import math

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from sparse_lm.ops.checks import check_product_dtypes
from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.hopper.frame import split_k, wgmma_sp
from sparse_lm.ops.hopper.frame.operands import pad, result_type
from sparse_lm.ops.hopper.frame.persistent import multiply
from sparse_lm.ops.hopper.frame.schedule import rows_in_use
from sparse_lm.ops.hopper.frame.tiling import STEP, Epilogue, Loads, Tiling, check_in_block
from sparse_lm.ops.hopper.products.sampled_rows_24 import sampled_rows_24

# M counts listed rows, N tokens. With the time of a tile (measured on an H200).
CANDIDATES = ((Tiling(256, 192), 1.36), (Tiling(128, 256), 1.0), (Tiling(256, 128), 1.04))


def heuristic_config(tokens: int, kept: int, dim: int, v: int) -> Tiling:
    """Chooses the candidate that is done first, of those whose tiles of tokens lie in one block.

    Raises:
      NotImplementedError: there is none.
    """
    fitting = [candidate for candidate in CANDIDATES if v % candidate[0].tile_n == 0]
    if not fitting:
        raise NotImplementedError(f"needs v to be a multiple of 128 or 192, not {v}")
    return split_k.fastest(fitting, kept, tokens, pl.cdiv(dim, STEP))


def sampled_matmul_24(
    w: Sparse24,
    x: Array,
    neuron_ids: Array,
    v: int,
    *,
    contiguous: int = 1,
    out_dtype: DTypeLike | None = None,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.sampled_matmul_24`; v is a multiple of 64.

    Neurons whose runs no tile here fits are taken one by one (sampled_rows_24.py); `config` is for contiguous ones.
    Last blocks that list only F cost little if they are contiguous.

    Raises:
      NotImplementedError: the dtypes, or v.
      ValueError: a config whose clusters' tiles do not lie in one block.
    """
    if not takes_contiguous(contiguous, v):
        return sampled_rows_24(w, x, neuron_ids, v, out_dtype=out_dtype)
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    check_product_dtypes(w.dtype, x.dtype, out_dtype)
    tokens, kept = x.shape[0], neuron_ids.shape[1]
    config = config or heuristic_config(tokens, kept, x.shape[1], v)
    out = result_type(tokens, kept, out_dtype)
    (product,) = multiply_listed(config, w, pad(x), neuron_ids, v, contiguous, out, name="sampled_matmul_24")
    return product[:tokens, :kept]


def takes_contiguous(contiguous: int, v: int) -> bool:
    """Returns True if a tile here fits the contiguous rows and the blocks."""
    return contiguous % wgmma_sp.ROWS == 0 and any(v % candidate.tile_n == 0 for candidate, _ in CANDIDATES)


def multiply_listed(
    config: Tiling,
    w: Sparse24,
    x: Array,
    neuron_ids: Array,
    v: int,
    contiguous: int,
    out: jax.ShapeDtypeStruct,
    *,
    name: str,
    epilogue: Epilogue | None = None,
) -> list[Array]:
    """Computes the product `out`, or what the epilogue makes of its transpose, [Kc, T]; x is in whole tiles."""
    tokens, kept = x.shape[0], neuron_ids.shape[1]
    check_in_block(config.cluster_n, v, "tokens")
    steps = w.values.shape[1] // wgmma_sp.KEPT
    box = math.gcd(contiguous, config.tile_m)

    def in_use(operands, _, token):
        return token < operands[-1][0]  # read for each job anew, from the cache: consumers lack a register for it

    def loads(operands, job):
        values, metadata, x, neuron_ids, _ = operands
        block = lax.div(job.column, v)
        rows = {
            first: neuron_ids[block, lax.min(job.row + first, kept - box)] for first in range(0, config.tile_m, box)
        }

        def copies(k, _, stage):
            boxes = [stage.copy_sparse(values, metadata, row, k, first=first, rows=box) for first, row in rows.items()]
            return [*itertools.chain(*boxes), stage.copy_b(x, job.column, k * STEP)]

        return Loads(copies)

    grid, jobs = split_k.schedule_product(config, kept, tokens, steps, in_use)
    return multiply(
        config,
        grid,
        jobs,
        loads,
        (w.values, w.metadata, x, neuron_ids, rows_in_use(neuron_ids[:, ::contiguous], v, w.shape[0])),
        out,
        name=name,
        dtype=x.dtype,
        b_transposed=True,
        out_transposed=True,
        epilogue=epilogue,
    )
