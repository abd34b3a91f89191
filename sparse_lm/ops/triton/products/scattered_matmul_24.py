"""Multiplies a 2:4 matrix by a dense one, block by block along k, each added to the rows that it lists.

The rows come in slices of contiguous ones, and a tile of the result lies in one slice. So its sum runs over the blocks
that list the slice, wherever in their list it stands: a thread block reads from a table which blocks and where. How
many there are is known at run time only; the tiles with most to do start first. The frame is product.py.

Numerics: float32 accumulation in the order of k; one rounding to the result's dtype.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sparse_lm.ops.checks import check_product_dtypes
from sparse_lm.ops.formats import TILE, Sparse24
from sparse_lm.ops.row_order import inverted_index
from sparse_lm.ops.triton.frame import mma_sp, product
from sparse_lm.ops.triton.frame.gluon_call import align_rows
from sparse_lm.ops.triton.frame.product import STEP, Product, launch
from sparse_lm.ops.triton.frame.tiling import Tiling, largest_that_occupies
from sparse_lm.ops.triton.products.matmul_24 import CANDIDATES


@dataclasses.dataclass(frozen=True)
class Lists:
    """The numbers of the lists that are known when the kernel is compiled.

    Attributes:
      tiles: of the result, in a slice.
      steps: of 64 columns of the 2:4 operand that share a list.
      listings: slices that a block lists.
      places: of a slice in the table; the last is none.
    """

    tiles: int
    steps: int
    listings: int
    places: int


@gluon.jit
def _look_up(places, of_slice, number, lists: gl.constexpr):
    """Computes where step `number` of a slice's sum is: the listing of a block; the step along k, past the last if
    nowhere."""
    place = gl.load(places + of_slice * lists.places + gl.minimum(number // lists.steps, lists.places - 1))
    return place % lists.listings, place // lists.listings * lists.steps + number % lists.steps


@gluon.jit
def _start_copies(
    operands, smem, slot: gl.constexpr, at, tile_in_slice, tile_n, shape: gl.constexpr, lists: gl.constexpr
):
    values, metadata, b = operands
    listing, step = at
    tile = listing * lists.tiles + tile_in_slice
    product.copy_rows(values, metadata, smem[0][slot], smem[1][slot], tile, step, shape)
    product.copy_b(b, smem[2][slot], step * STEP, tile_n, shape)
    async_copy.commit_group()


@gluon.jit
def _scattered_matmul_24_kernel(
    values, metadata, b, places, counts, order, out, shape: gl.constexpr, lists: gl.constexpr
):
    tiling: gl.constexpr = shape.tiling
    stages: gl.constexpr = tiling.stages
    operands = (values, metadata, b)
    smem = product.allocate(b.dtype.element_ty, shape)
    grid: gl.constexpr = shape.grid
    tile_m, tile_n = gl.load(order + gl.program_id(0) // grid[1]), gl.program_id(0) % grid[1]
    of_slice, tile_in_slice = tile_m // lists.tiles, tile_m % lists.tiles
    for slot in gl.static_range(stages - 1):
        at = _look_up(places, of_slice, slot, lists)
        _start_copies(operands, smem, slot, at, tile_in_slice, tile_n, shape, lists)

    sums = mma_sp.zeros(tiling.tile_m, tiling.tile_n, tiling.warps_m, tiling.warps_n)
    # Steps past a slice's last one, which fill up the last round of the ring, multiply zeros.
    for first in range(0, gl.load(counts + of_slice) * lists.steps, stages):
        for slot in gl.static_range(stages):
            at = _look_up(places, of_slice, first + slot + stages - 1, lists)
            async_copy.wait_group(stages - 2)
            # Into what the step before has read: the barrier that ends the wait is behind that.
            _start_copies(operands, smem, (slot + stages - 1) % stages, at, tile_in_slice, tile_n, shape, lists)
            sums = product.multiply_step(smem[0][slot], smem[1][slot], smem[2][slot], (), sums, shape)
    async_copy.wait_group(0)
    product.store_tile(mma_sp.to_tile(sums, tiling.warps_m, tiling.warps_n), out, tile_m, tile_n, shape)


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
    """See `sparse_lm.ops.scattered_matmul_24`. A copy of b is made if its rows are no multiple of 16 bytes.

    Slices past the last row are left out.

    Raises:
      NotImplementedError: the dtypes; contiguous or v, which are multiples of 64; or rows, a multiple of contiguous.
    """
    out_dtype = jnp.dtype(out_dtype or b.dtype)
    check_product_dtypes(a.dtype, b.dtype, out_dtype)
    if v % TILE or contiguous % TILE:
        raise NotImplementedError(f"needs v and contiguous to be multiples of {TILE}, not {v} and {contiguous}")
    if rows % contiguous:
        raise NotImplementedError(f"needs slices of {contiguous} to divide the {rows} rows of the result")
    tokens, n = b.shape
    fitting = [candidate for candidate in CANDIDATES if contiguous % candidate.tile_m == 0]
    config = config or largest_that_occupies(fitting, rows, n)
    b = align_rows(b)
    shape = Product(
        rows, n, tokens, rows=a.values.shape[0], steps=a.metadata.shape[1], b_stride=b.shape[1], tiling=config
    )
    places, counts = inverted_index(neuron_ids[:, ::contiguous] // contiguous, rows // contiguous)
    tiles = contiguous // config.tile_m
    order = jnp.argsort(-counts)[:, None] * tiles + jnp.arange(tiles)
    return launch(
        _scattered_matmul_24_kernel,
        a.values,
        a.metadata,
        b,
        places,
        counts,
        order.astype(jnp.int32),
        shape=shape,
        out_dtype=out_dtype,
        lists=Lists(tiles, v // TILE, neuron_ids.shape[1] // contiguous, places.shape[1]),
    )
