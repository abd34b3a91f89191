"""Multiplies a 2:4 matrix by a dense one, block by block along k, each added to the rows that it lists.

The rows come in slices of contiguous ones, and a tile of the result lies in one slice. So its sum runs over the blocks
that list the slice, wherever in their list it stands: the producer reads from a table which blocks and
where. How many there are, and so a tile's steps, is known at run time only (stream_k.py).

Numerics: float32 accumulation in the order of k, in parts where a tile is cut; one rounding to the result's
dtype. The cuts depend on the lists, the configuration and the number of multiprocessors, and never on timing.
"""

from __future__ import annotations

import dataclasses

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from sparse_lm.ops.checks import check_multiples, product_dtype
from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.hopper.frame import stream_k, wgmma_sp
from sparse_lm.ops.hopper.frame.operands import pad, result_type
from sparse_lm.ops.hopper.frame.persistent import multiply
from sparse_lm.ops.hopper.frame.schedule import cluster_count
from sparse_lm.ops.hopper.frame.tiling import STEP, Loads, Tiling
from sparse_lm.ops.row_order import inverted_index

# A band's tiles lie side by side, and it is computed row by row before the next band. Those of a row read the same
# blocks of b, and the L2 cache should hold the band's columns of all of them: then the memory is asked for b once, and
# for the sparse operand once a band. Times are those of a cluster's tile, where shared memory limits it.
CANDIDATES = (
    Tiling(256, 192, raster_width=3, time=1.36),
    Tiling(256, 192, share_b=False, raster_width=3, time=1.36),
    Tiling(128, 256, raster_width=3),
    Tiling(128, 256, share_b=False, raster_width=2),
)
_WHOLE_ROWS = 2048  # columns of b, of which the cache holds what the tiles of a row read


def heuristic_config(contiguous: int, listings: int, n: int) -> Tiling:
    """Chooses the fastest candidate of those whose cluster's rows a slice holds; of equals the one that reads least.

    Slices have `contiguous` rows, blocks list `listings` slices each, and the result has n columns. Slices that no
    tile divides are refused.
    """
    fitting = [tiling for tiling in CANDIDATES if contiguous % tiling.cluster_m == 0]
    if not fitting:
        raise NotImplementedError(f"needs a multiple of 128 contiguous rows, not {contiguous}")
    # By the time of all columns, for each row.
    config = min(fitting, key=lambda tiling: tiling.time * pl.cdiv(n, tiling.cluster_n) / tiling.cluster_m)
    # The memory is asked for all operands once, if whole rows of tiles run together.
    if listings == 1 or (config.share_b and n <= _WHOLE_ROWS):
        return dataclasses.replace(config, raster_width=pl.cdiv(n, config.cluster_n))
    return config


def tile_at(tile: Array, grid: tuple[int, int], raster_width: int) -> tuple[Array, Array]:
    """Returns row and column of a grid's tile in bands of `raster_width` columns; the last band may be narrower."""
    height, width = grid
    first_column = lax.div(tile, height * raster_width) * raster_width
    band = lax.min(raster_width, width - first_column)
    in_band = tile - first_column * height
    return lax.div(in_band, band), first_column + lax.rem(in_band, band)


def by_tile(of_rows: Array, grid: tuple[int, int], raster_width: int) -> Array:
    """Repeats what each row of a grid has for each of its tiles in that order; XLA fuses it, unlike a look-up."""
    _, width = grid
    bands = [min(raster_width, width - first) for first in range(0, width, raster_width)]
    return jnp.concatenate([jnp.repeat(of_rows, band) for band in bands])


def scattered_matmul_24(
    a: Sparse24,
    b: Array,
    neuron_ids: Array,
    v: int,
    rows: int,
    *,
    contiguous: int = 1,
    out_dtype: DTypeLike | None = None,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.scattered_matmul_24`.

    It refuses dtypes that are no 16-bit floats, a `contiguous` that is no multiple of 128 or does not divide `rows`, a
    v that is no multiple of 64, a T of 64 at most, and a `config` whose cluster's tiles do not lie in one slice.

    Slices past the last row are left out: a block of slots that hold no token, if it lists only such, costs nothing.
    """
    out_dtype = product_dtype(a, b, out_dtype)
    n = b.shape[1]
    listings = neuron_ids.shape[1] // contiguous  # slices that a block lists
    config = config or heuristic_config(contiguous, listings, n)
    check_multiples({"v": (v, STEP), "rows": (rows, contiguous), "contiguous": (contiguous, config.cluster_m)})
    # Steps past the end must read zeros, but copies ignore the index into a dimension of a single tile (operands.py).
    if a.values.shape[1] == wgmma_sp.KEPT:
        raise NotImplementedError(f"needs more than {STEP} columns of the sparse operand, not {a.shape[1]}")
    b, out = pad(b), result_type(rows, n, out_dtype)
    steps = v // STEP  # of a block
    grid = config.grid(out.shape[0], b.shape[1])
    clusters = cluster_count()
    places, counts = inverted_index(neuron_ids[:, ::contiguous] // contiguous, out.shape[0] // contiguous)
    pairs = jnp.repeat(jnp.maximum((counts * steps + 1) // 2, 1), contiguous // config.cluster_m)
    pairs, tile_rows = stream_k.descending(pairs)
    shares = stream_k.shares(clusters, by_tile(pairs, grid, config.raster_width))

    def jobs(operands, cluster, peer):
        *_, shares, tile_rows, pairs = operands

        def place(tile):
            return tile_at(tile, grid, config.raster_width)

        def origin(tile):
            row, column = place(tile)
            return config.origin(tile_rows[row], column, peer)

        return stream_k.jobs(clusters, shares, cluster, lambda tile: pairs[place(tile)[0]], origin)

    def loads(operands, job):
        values, metadata, b, places, *_ = operands
        out_slice, offset = lax.div(job.row, contiguous), lax.rem(job.row, contiguous)

        def look_up(k):
            """Returns row of a and step along T: past its end, where copies read zeros, if no further block lists the
            slice."""
            place = places[out_slice, lax.div(k, steps)]
            row = lax.rem(place, listings) * contiguous + offset
            return row, lax.div(place, listings) * steps + lax.rem(k, steps)

        def copies(_, looked_up, stage):
            row, step = looked_up
            return [*stage.copy_sparse(values, metadata, row, step), stage.copy_b(b, step * STEP, job.column)]

        return Loads(copies, look_up)

    operands = a.values, a.metadata, b, places, shares, tile_rows, pairs
    product = multiply(config, (stream_k.grid(clusters), jobs), loads, operands, out, name="scattered_matmul_24")
    return product[:, :n]
