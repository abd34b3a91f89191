"""2:4 matrix times dense matrix, block by block along k, each added to the rows of the result that it lists.

The rows come in runs, and a tile of the result lies in one of them. So its sum runs over the blocks
that list the run, wherever in their list it stands: the producer reads from a table which blocks and
where. How many there are, and so a tile's steps, is known at run time only (stream_k.py). The blocks
of a cluster compute tiles side by side, so that they share the tile of the sparse operand.

Numerics: float32 accumulation in the order of k, in parts where a tile is cut, which depends on the
lists alone; one rounding to the result's dtype.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.hopper import compat, wgmma_sp
from sparse_lm.ops.hopper.matmul_24 import check_dtypes, pad, round_up
from sparse_lm.ops.hopper.persistent import STEP, Loads, Tiling, multiply
from sparse_lm.ops.hopper.stream_k import StreamK

LARGE, SMALL = Tiling(256, 192), Tiling(128, 256)


def heuristic_tiling(n: int, run: int) -> Tiling:
    """The larger one is faster by a tenth, if it divides the run and does not lose as much past the last column.

    Raises:
      NotImplementedError: none divides the run.
    """
    if run % SMALL.tile_m:
        raise NotImplementedError(f"needs runs of a multiple of {SMALL.tile_m}, not {run}")
    waste_large, waste_small = (_width(tiling, n) * tiling.cluster * tiling.tile_n for tiling in (LARGE, SMALL))
    return LARGE if run % LARGE.tile_m == 0 and waste_large < 1.1 * waste_small else SMALL


def scattered_matmul_24(
    a: Sparse24,
    b: Array,
    columns: Array,
    v: int,
    rows: int,
    *,
    run: int = 1,
    out_dtype: DTypeLike | None = None,
    tiling: Tiling | None = None,
) -> Array:
    """out[columns[t // v, j]] += a[j, t] b[t], from zeros.

    Args:
      a: [Kc, T], 2:4 along T, bfloat16 or float16.
      b: [T, D] in the dtype of a.
      columns: int32 [ceil(T / v), Kc], rows of the result, distinct within a block, in runs.
      v: columns of a that share a list, a multiple of 64.
      rows: of the result, a multiple of run.
      run: that many columns are consecutive, and start at a multiple of it; a multiple of 128.
      out_dtype: bfloat16, float16 or float32; that of b by default.
      tiling: tile_m divides run.

    Returns:
      [rows, D].

    Raises:
      NotImplementedError: the dtypes, run, v, rows, or a T of 64 at most.
    """
    out_dtype = jnp.dtype(out_dtype or b.dtype)
    check_dtypes(a.dtype, b.dtype, out_dtype)
    n = b.shape[1]
    tiling = tiling or heuristic_tiling(n, run)
    if v % STEP:
        raise NotImplementedError(f"needs v to be a multiple of {STEP}, not {v}")
    if rows % run:
        raise NotImplementedError(f"needs runs of {run} to divide the {rows} rows of the result")
    if a.values.shape[1] == wgmma_sp.KEPT:
        raise NotImplementedError(f"needs more than {STEP} columns of the sparse operand, not {a.shape[1]}")
    out = jax.ShapeDtypeStruct((rows, max(2 * wgmma_sp.ROWS, round_up(n))), out_dtype)
    return _call(tiling, a, pad(b), columns, v, run, out)[:, :n]


def _call(tiling: Tiling, a: Sparse24, b: Array, columns: Array, v: int, run: int, out: jax.ShapeDtypeStruct) -> Array:
    rows = out.shape[0]
    steps = v // STEP  # of a block
    listings = columns.shape[1] // run  # runs that a block lists
    stream = StreamK(compat.core_count() // tiling.cluster, _width(tiling, b.shape[1]))
    places, counts = listed_at(columns[:, ::run] // run, rows // run)
    pairs = jnp.repeat(jnp.maximum((counts * steps + 1) // 2, 1), run // tiling.tile_m)
    shared = dict(rows=tiling.tile_m, multicast=tiling.cluster > 1)

    def jobs(operands, cluster, peer):
        *_, shares, pairs = operands

        def origin(tile):
            row, column = lax.div(tile, stream.width), lax.rem(tile, stream.width)
            return row * tiling.tile_m, (column * tiling.cluster + peer) * tiling.tile_n

        return stream.jobs(shares, pairs, cluster, origin)

    def loads(operands, job):
        values, metadata, b, places, *_ = operands
        out_run, offset = lax.div(job.row, run), lax.rem(job.row, run)

        def look_up(k):
            """Row of a and step along T: past its end, where copies read zeros, if no further block lists the run."""
            place = places[out_run, lax.div(k, steps)]
            row = lax.rem(place, listings) * run + offset
            return row, lax.div(place, listings) * steps + lax.rem(k, steps)

        def copies(_, looked_up, stage):
            row, step = looked_up
            return [
                stage.copy_values(values, row, step, **shared),
                stage.copy_metadata(metadata, row, step, **shared),
                stage.copy_b(b, step * STEP, job.column, multicast=False),
            ]

        return Loads(copies, look_up)

    return multiply(
        tiling,
        stream.grid,
        jobs,
        loads,
        (a.values, a.metadata, b, places, stream.shares(pairs), pairs),
        out,
        dtype=b.dtype,
        b_transposed=False,
        out_transposed=False,
    )


def listed_at(lists: Array, runs: int) -> tuple[Array, Array]:
    """Which blocks list each run, and where.

    Args:
      lists: int32 [blocks, P], the runs that a block lists, distinct.
      runs: how many there are.

    Returns:
      int32 [runs, blocks + 2]: places block * P + position, in order of the blocks, and after those the place
        blocks * P, which is none; int32 [runs], how many blocks list a run.
    """
    blocks, listings = lists.shape
    here = lists[None, :, :] == jnp.arange(runs)[:, None, None]
    position = jnp.max(jnp.where(here, jnp.arange(listings), -1), axis=2)
    listed = position >= 0
    block = jnp.arange(blocks)
    rank = jnp.sum(listed[:, None, :] & (block < block[:, None]), axis=2)
    slot = jnp.where(listed, rank, -1)[:, None, :] == jnp.arange(blocks + 2)[:, None]
    places = jnp.min(jnp.where(slot, (block * listings + position)[:, None, :], blocks * listings), axis=2)
    return places.astype(jnp.int32), jnp.sum(listed, axis=1, dtype=jnp.int32)


def _width(tiling: Tiling, n: int) -> int:
    """Tiles of a cluster along N."""
    return pl.cdiv(n, tiling.tile_n * tiling.cluster)
