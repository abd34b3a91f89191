"""2:4 matrix times dense matrix, block by block along k, each added to the rows of the result that it lists.

The rows come in runs, and a tile of the result lies in one of them. So its sum runs over the blocks
that list the run, wherever in their list it stands: the producer reads from a table which blocks and
where. How many there are, and so a tile's steps, is known at run time only (stream_k.py). The blocks
of a cluster compute tiles side by side, so that they share the tile of the sparse operand.

Numerics: float32 accumulation in the order of k, in parts where a tile is cut; one rounding to the result's
dtype. The cuts depend on the lists, the configuration and the number of multiprocessors, and never on timing.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.hopper.frame import device, wgmma_sp
from sparse_lm.ops.hopper.frame.operands import pad, result_type
from sparse_lm.ops.hopper.frame.persistent import multiply
from sparse_lm.ops.hopper.frame.stream_k import StreamK, descending
from sparse_lm.ops.hopper.frame.tiling import STEP, Loads, Tiling, check_in_block
from sparse_lm.ops.kernel_dtypes import check_product_dtypes
from sparse_lm.ops.listings import listed_at


@dataclasses.dataclass(frozen=True)
class Config(Tiling):
    """How the product is cut up.

    Attributes:
      raster_width: clusters' tiles side by side in a band, which is computed row by row before the next band. Those of
        a row read the same blocks of b, and the L2 cache should hold the band's columns of all of them: then the
        memory is asked for b once, and for the sparse operand once a band.
    """

    raster_width: int = 3


# With the time of a cluster's tile, where shared memory limits it.
CANDIDATES = (
    (Config(256, 192), 1.36),
    (Config(256, 192, share_b=False), 1.36),
    (Config(128, 256), 1.0),
    (Config(128, 256, share_b=False, raster_width=2), 1.0),
)
_WHOLE_ROWS = 2048  # columns of b, of which the cache holds what the tiles of a row read


def heuristic_config(run: int, listings: int, n: int) -> Config:
    """The fastest candidate of those whose cluster's rows a run holds; of equals the one that reads least.

    Args:
      run: consecutive rows that are listed together.
      listings: of a block.
      n: columns of the result.

    Raises:
      NotImplementedError: no tile divides the run.
    """
    fitting = [candidate for candidate in CANDIDATES if run % candidate[0].cluster_m == 0]
    if not fitting:
        raise NotImplementedError(f"needs runs of a multiple of 128, not {run}")

    def time(candidate: tuple[Config, float]) -> float:
        """Of all columns, by rows."""
        config, tile_time = candidate
        return tile_time * pl.cdiv(n, config.cluster_n) / config.cluster_m

    config = min(fitting, key=time)[0]
    # The memory is asked for all operands once, if whole rows of tiles run together.
    if listings == 1 or (config.share_b and n <= _WHOLE_ROWS):
        return dataclasses.replace(config, raster_width=pl.cdiv(n, config.cluster_n))
    return config


def tile_at(tile: Array, grid: tuple[int, int], raster_width: int) -> tuple[Array, Array]:
    """Row and column of the tiles of a grid in the order of `Config.raster_width`; the last band may be narrower."""
    height, width = grid
    first_column = lax.div(tile, height * raster_width) * raster_width
    band = lax.min(raster_width, width - first_column)
    in_band = tile - first_column * height
    return lax.div(in_band, band), first_column + lax.rem(in_band, band)


def by_tile(of_rows: Array, grid: tuple[int, int], raster_width: int) -> Array:
    """What is given of each row of a grid, of each of its tiles in that order; XLA fuses it, unlike a look-up."""
    _, width = grid
    bands = [min(raster_width, width - first) for first in range(0, width, raster_width)]
    return jnp.concatenate([jnp.repeat(of_rows, band) for band in bands])


def scattered_matmul_24(
    a: Sparse24,
    b: Array,
    columns: Array,
    v: int,
    rows: int,
    *,
    run: int = 1,
    out_dtype: DTypeLike | None = None,
    config: Config | None = None,
) -> Array:
    """out[columns[t // v, j]] += a[j, t] b[t], from zeros.

    Args:
      a: [Kc, T], 2:4 along T, bfloat16 or float16.
      b: [T, D] in the dtype of a.
      columns: int32 [ceil(T / v), Kc], rows of the result, distinct within a block, in runs. Runs past the last row
        are left out: a block of slots that hold no token, if it lists only such, costs nothing.
      v: columns of a that share a list, a multiple of 64.
      rows: of the result, a multiple of run.
      run: that many columns are consecutive, and start at a multiple of it; a multiple of 128.
      out_dtype: bfloat16, float16 or float32; that of b by default.
      config: tiling; what a cluster has of rows divides run.

    Returns:
      [rows, D].

    Raises:
      NotImplementedError: the dtypes, run, v, rows, or a T of 64 at most.
      ValueError: a config whose clusters' tiles do not lie in one run.
    """
    out_dtype = jnp.dtype(out_dtype or b.dtype)
    check_product_dtypes(a.dtype, b.dtype, out_dtype)
    n = b.shape[1]
    config = config or heuristic_config(run, columns.shape[1] // run, n)
    if v % STEP:
        raise NotImplementedError(f"needs v to be a multiple of {STEP}, not {v}")
    check_in_block(config.cluster_m, run, "rows")
    if rows % run:
        raise NotImplementedError(f"needs runs of {run} to divide the {rows} rows of the result")
    # Steps past the end must read zeros, but copies ignore the index into a dimension of a single tile (operands.py).
    if a.values.shape[1] == wgmma_sp.KEPT:
        raise NotImplementedError(f"needs more than {STEP} columns of the sparse operand, not {a.shape[1]}")
    return _call(config, a, pad(b), columns, v, run, result_type(rows, n, out_dtype))[:, :n]


def _call(config: Config, a: Sparse24, b: Array, columns: Array, v: int, run: int, out: jax.ShapeDtypeStruct) -> Array:
    steps = v // STEP  # of a block
    listings = columns.shape[1] // run  # runs that a block lists
    grid = config.grid(out.shape[0], b.shape[1])
    stream = StreamK(device.cluster_count(config.cluster))
    places, counts = listed_at(columns[:, ::run] // run, out.shape[0] // run)
    pairs, rows = descending(jnp.repeat(jnp.maximum((counts * steps + 1) // 2, 1), run // config.cluster_m))
    shares = stream.shares(by_tile(pairs, grid, config.raster_width))

    def jobs(operands, cluster, peer):
        *_, shares, rows, pairs = operands

        def place(tile):
            return tile_at(tile, grid, config.raster_width)

        def origin(tile):
            row, column = place(tile)
            return config.origin(rows[row], column, peer)

        return stream.jobs(shares, cluster, lambda tile: pairs[place(tile)[0]], origin)

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
            return [*stage.copy_sparse(values, metadata, row, step), stage.copy_b(b, step * STEP, job.column)]

        return Loads(copies, look_up)

    (product,) = multiply(
        config,
        stream.grid,
        jobs,
        loads,
        (a.values, a.metadata, b, places, shares, rows, pairs),
        out,
        name="scattered_matmul_24",
        dtype=b.dtype,
        b_transposed=False,
        out_transposed=False,
    )
    return product
