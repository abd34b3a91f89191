"""The frame of the products with a 2:4 operand: a ring of shared-memory stages that `cp.async` keeps full.

A thread block computes one tile of the result, 64 logical k a step: what a word of metadata describes. Its threads
start the copies of a later step before the instructions of this one. Tiles of a band share the L2 cache, for which a
tile should be large and tall, because its 2:4 side is half as heavy. Where that does not limit, as on an H200, two
thread blocks of 128 x 128 side by side are as fast, or faster.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax import Array
from jax.typing import DTypeLike
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sparse_lm.ops.formats import TILE
from sparse_lm.ops.triton.frame import mma_sp
from sparse_lm.ops.triton.frame.gluon_call import gluon_call
from sparse_lm.ops.triton.frame.tiling import Tiling

STEP = gl.constexpr(TILE)  # logical k
_KEPT = gl.constexpr(TILE // 2)
_WORDS = gl.constexpr(2 * TILE)  # of metadata for 64 rows
_VECTOR_BYTES = 16  # of a copy


@dataclasses.dataclass(frozen=True)
class Product:
    """Everything about a product that is known when its kernel is compiled.

    Attributes:
      m, n, k: logical sizes of the product; k is that of b.
      rows: of the 2:4 operand's arrays.
      steps: of 64 along its columns.
      b_stride: elements between rows of b as it is stored, a multiple of 8; zeros from n (or k) on.
      b_transposed: b is stored as [N, K].
      out_transposed: the result is stored as [N, M].
      v: rows of the 2:4 operand that share a list of the rows of b that they read; 0 if there are no lists.
      sampled: the lists are of rows of the 2:4 operand instead, and v columns of the result share one.
      tiling: how it is cut up.
    """

    m: int
    n: int
    k: int
    rows: int
    steps: int
    b_stride: int
    tiling: Tiling
    b_transposed: bool = False
    out_transposed: bool = False
    v: int = 0
    sampled: bool = False

    @property
    def grid(self) -> tuple[int, int]:
        """Counts tiles along M and N."""
        return self.tiling.grid(self.m, self.n)


def launch(kernel, *operands: Array, shape: Product, out_dtype: DTypeLike, **constants: Any) -> Array:
    """Runs a kernel, a thread block for each tile of the product, whose constants are `shape` and any others."""
    return gluon_call(
        kernel,
        *operands,
        out=jax.ShapeDtypeStruct((shape.n, shape.m) if shape.out_transposed else (shape.m, shape.n), out_dtype),
        blocks=math.prod(shape.grid),
        warps=shape.tiling.warps,
        constants=dict(shape=shape) | constants,
    )


@gluon.constexpr_function
def copy_layout(columns, element_bytes, warps):
    """Returns the layout of a row-major tile in copies of 16 bytes."""
    vector = _VECTOR_BYTES // element_bytes
    across = min(32, columns // vector)
    return gl.BlockedLayout([1, vector], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def shared_layout(columns):
    """Returns the layout of a row-major tile of 16-bit numbers; eight rows' vectors of a column are in different
    banks."""
    row_bytes = 2 * columns
    rows_of_banks = max(1, 128 // row_bytes)
    vectors = row_bytes // _VECTOR_BYTES
    return gl.SwizzledSharedLayout(_VECTOR_BYTES // 2, rows_of_banks, min(8, vectors), [1, 0])


@gluon.constexpr_function
def _words_shared_layout():
    """Returns a layout of rows as they come: a warp reads one whole row, of all banks."""
    return gl.SwizzledSharedLayout(vec=4, per_phase=1, max_phase=1, order=[1, 0])


@gluon.constexpr_function
def _transposed_layout(layout):
    def turn(sizes):
        return sizes[::-1]

    return gl.BlockedLayout(
        turn(layout.size_per_thread), turn(layout.threads_per_warp), turn(layout.warps_per_cta), [0, 1]
    )


@gluon.jit
def tile_of_block(product: gl.constexpr):
    """Returns this thread block's tile, in tiles: down a band of `raster_width` tiles first."""
    number = gl.program_id(0)
    grid: gl.constexpr = product.grid
    band_size: gl.constexpr = product.tiling.raster_width * grid[1]
    first = number // band_size * product.tiling.raster_width
    width = gl.minimum(grid[0] - first, product.tiling.raster_width)
    return first + number % band_size % width, number % band_size // width


@gluon.jit
def numbers(count: gl.constexpr, layout: gl.constexpr, axis: gl.constexpr):
    """Returns 0, 1, .. as a column (axis 0) or a row (axis 1) of indices."""
    return gl.arange(0, count, gl.SliceLayout(1 - axis, layout)).expand_dims(1 - axis)


@gluon.jit
def _place_rows(columns, tile_m, tile_n, product: gl.constexpr):
    """Computes where a tile's listed rows of the 2:4 operand are, for all of its steps.

    Returns:
      rows of the values [tile_m, 1]; offsets of the words that have the halves of rows g, and below them of rows
      g + 8, of each 16 listed ones [tile_m / 8, 32]; by how much to shift those words, twice, as fragments.
    """
    if product.sampled:
        tiling: gl.constexpr = product.tiling
        first = tile_m * tiling.tile_m
        columns = columns + tile_n * tiling.tile_n // product.v * product.m
        row = gl.minimum(first + numbers(tiling.tile_m, copy_layout(_KEPT, 2, tiling.warps), 0), product.m - 1)

        sixteens: gl.constexpr = tiling.tile_m // mma_sp.ROWS
        layout: gl.constexpr = _listed_words_layout(tiling.warps)
        half, lane = numbers(2 * sixteens, layout, 0), numbers(32, layout, 1)
        place = first + half % sixteens * 16 + half // sixteens * 8 + lane // 4
        listed = gl.minimum(gl.load(columns + gl.minimum(place, product.m - 1)), product.rows - 1)
        word = listed % STEP // 16 * 32 + listed % 8 * 4 + lane % 4

        words: gl.constexpr = gl.SliceLayout(
            1, gl.SliceLayout(3, mma_sp.fragment_layout(tiling.warps_m, tiling.warps_n))
        )
        place = first + numbers(sixteens, words, 0) * 16 + numbers(32, words, 1) // 4
        low = gl.load(columns + gl.minimum(place, product.m - 1)) % 16 // 8 * 16
        high = gl.load(columns + gl.minimum(place + 8, product.m - 1)) % 16 // 8 * 16
        return gl.load(columns + row), listed // STEP * (product.steps * _WORDS) + word, low, high
    else:
        return ()


@gluon.constexpr_function
def _listed_words_layout(warps):
    """Returns the layout of words copied one by one."""
    return gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])


@gluon.jit
def _copy_listed(values, metadata, values_smem, words_smem, places, step, product: gl.constexpr):
    """Copies listed rows of a step, zeros for those past the last row; and words that have their halves."""
    live = step < product.steps
    row, offset, _, _ = places
    column = numbers(_KEPT, copy_layout(_KEPT, 2, product.tiling.warps), 1)
    source = values + step * _KEPT + row.to(gl.int64) * (product.steps * _KEPT) + column
    async_copy.async_copy_global_to_shared(values_smem, source, mask=live & (row < product.rows))
    async_copy.async_copy_global_to_shared(words_smem, metadata + step * _WORDS + offset, mask=live & (offset >= 0))


@gluon.jit
def copy_rows(values, metadata, values_smem, words_smem, tile, step, product: gl.constexpr):
    """Copies rows and words of a step. Past the last row, those of the last one are copied; past the last step, zeros.

    Zeros are no words of metadata: past the last step, those of the last one are copied.
    """
    tiling: gl.constexpr = product.tiling
    live = step < product.steps
    layout: gl.constexpr = copy_layout(_KEPT, 2, tiling.warps)
    stride: gl.constexpr = product.steps * _KEPT
    row, column = numbers(tiling.tile_m, layout, 0), numbers(_KEPT, layout, 1)
    if product.rows % tiling.tile_m != 0:
        row = gl.minimum(row, product.rows - 1 - tile * tiling.tile_m)
    origin = values + (tile * tiling.tile_m).to(gl.int64) * stride + step * _KEPT
    async_copy.async_copy_global_to_shared(values_smem, origin + (row * stride + column), mask=live & (row >= 0))

    sixteens: gl.constexpr = tiling.tile_m // mma_sp.ROWS
    words_layout: gl.constexpr = copy_layout(32, 4, tiling.warps)
    sixteen, lane = numbers(sixteens, words_layout, 0), numbers(32, words_layout, 1)
    if product.rows % tiling.tile_m != 0:
        sixteen = gl.minimum(sixteen, product.rows // mma_sp.ROWS - 1 - tile * sixteens)
    origin = metadata + (tile * (sixteens // 4)).to(gl.int64) * (product.steps * _WORDS)
    origin += gl.minimum(step, product.steps - 1) * _WORDS
    offset = sixteen // 4 * (product.steps * _WORDS) + sixteen % 4 * 32 + lane
    async_copy.async_copy_global_to_shared(words_smem, origin + offset, mask=sixteen >= 0)


@gluon.constexpr_function
def _b_layout(product):
    return copy_layout(TILE if product.b_transposed else product.tiling.tile_n, 2, product.tiling.warps)


@gluon.jit
def look_up(columns, tile, step, product: gl.constexpr):
    """Looks up the rows of b that a step reads: the first, or if there are lists all; no row, `k`, past their ends."""
    if product.v == 0 or product.sampled:
        return gl.to_tensor(step) * STEP
    else:
        listed: gl.constexpr = product.steps * STEP
        block = tile * product.tiling.tile_m // product.v
        place = step * STEP + numbers(STEP, _b_layout(product), 0)
        return gl.load(columns + block * listed + place, mask=place < listed, other=product.k)


@gluon.jit
def copy_b(b, b_smem, rows, tile, product: gl.constexpr):
    """Copies the rows of b that `look_up` gave, in a tile's columns; zeros past the last of either.

    Masks end at whole vectors: at the ends of rows b has zeros.
    """
    layout: gl.constexpr = _b_layout(product)
    tile_n: gl.constexpr = product.tiling.tile_n
    stride: gl.constexpr = product.b_stride
    if product.b_transposed:
        k, n = numbers(STEP, layout, 1), numbers(tile_n, layout, 0)
        source = b + (tile * tile_n).to(gl.int64) * stride + rows + (n * stride + k)
        inside = (k < stride - rows) & (n < product.n - tile * tile_n)
    elif product.v == 0:
        k, n = numbers(STEP, layout, 0), numbers(tile_n, layout, 1)
        source = b + rows.to(gl.int64) * stride + tile * tile_n + (k * stride + n)
        inside = (k < product.k - rows) & (n < stride - tile * tile_n)
    else:
        n = numbers(tile_n, layout, 1)
        source = b + tile * tile_n + rows.to(gl.int64) * stride + n
        inside = (rows < product.k) & (n < stride - tile * tile_n)
    async_copy.async_copy_global_to_shared(b_smem, source, mask=inside)


@gluon.jit
def multiply_step(values_smem, words_smem, b_smem, places, sums, product: gl.constexpr):
    warps_m: gl.constexpr = product.tiling.warps_m
    warps_n: gl.constexpr = product.tiling.warps_n
    if product.sampled:
        sixteens: gl.constexpr = product.tiling.tile_m // mma_sp.ROWS
        low = mma_sp.load_words(words_smem.slice(0, sixteens), warps_m, warps_n)
        high = mma_sp.load_words(words_smem.slice(sixteens, sixteens), warps_m, warps_n)
        low, high = low >> places[2].expand_dims(1).expand_dims(3), high >> places[3].expand_dims(1).expand_dims(3)
        words = low & 0xFFFF | high << 16
    else:
        words = mma_sp.load_words(words_smem, warps_m, warps_n)
    for half in gl.static_range(2):
        a = mma_sp.load_a(values_smem.slice(half * mma_sp.KEPT, mma_sp.KEPT, dim=1), warps_m, warps_n)
        if product.b_transposed:
            b = b_smem.slice(half * mma_sp.STEP, mma_sp.STEP, dim=1).permute([1, 0])
        else:
            b = b_smem.slice(half * mma_sp.STEP, mma_sp.STEP, dim=0)
        left, right = mma_sp.load_b(b, warps_m, warps_n)
        sums = mma_sp.mma_sp(a, left, right, words, sums, half)
    return sums


@gluon.jit
def store_tile(tile, out, tile_m, tile_n, product: gl.constexpr):
    """Rounds once and stores, by way of shared memory, whole vectors along the result's rows as they are stored."""
    tiling: gl.constexpr = product.tiling
    tile = tile.to(out.dtype.element_ty)
    element_bytes: gl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    if product.out_transposed:
        layout: gl.constexpr = _transposed_layout(copy_layout(tiling.tile_m, element_bytes, tiling.warps))
    else:
        layout: gl.constexpr = copy_layout(tiling.tile_n, element_bytes, tiling.warps)
    row = tile_m * tiling.tile_m + numbers(tiling.tile_m, layout, 0)
    column = tile_n * tiling.tile_n + numbers(tiling.tile_n, layout, 1)
    if product.out_transposed:
        target = out + column.to(gl.int64) * product.m + row
    else:
        target = out + row.to(gl.int64) * product.n + column
    inside = (row < product.m) & (column < product.n)
    gl.store(target, gl.convert_layout(tile, layout), mask=inside)


@gluon.jit
def allocate(dtype: gl.constexpr, product: gl.constexpr):
    """Allocates stages of values, metadata words and b: each for itself, so that the compiler can tell them apart."""
    tiling: gl.constexpr = product.tiling
    rows: gl.constexpr = tiling.tile_n if product.b_transposed else STEP
    columns: gl.constexpr = STEP if product.b_transposed else tiling.tile_n
    sixteens: gl.constexpr = tiling.tile_m // mma_sp.ROWS * (2 if product.sampled else 1)
    stages: gl.constexpr = tiling.stages
    values, words, b = (), (), ()
    for _ in gl.static_range(stages):
        values += (gl.allocate_shared_memory(dtype, [tiling.tile_m, _KEPT], shared_layout(_KEPT)),)
        words += (gl.allocate_shared_memory(gl.int32, [sixteens, 32], _words_shared_layout()),)
        b += (gl.allocate_shared_memory(dtype, [rows, columns], shared_layout(columns)),)
    return values, words, b


@gluon.jit
def _start_copies(operands, smem, slot: gl.constexpr, tile_m, tile_n, places, step, rows, product: gl.constexpr):
    values, metadata, _, b = operands
    values_smem, words_smem, b_smem = smem
    if product.sampled:
        _copy_listed(values, metadata, values_smem[slot], words_smem[slot], places, step, product)
    else:
        copy_rows(values, metadata, values_smem[slot], words_smem[slot], tile_m, step, product)
    copy_b(b, b_smem[slot], rows, tile_n, product)
    async_copy.commit_group()


@gluon.jit
def _advance(operands, smem, slot: gl.constexpr, tile_m, tile_n, places, step, sums, product: gl.constexpr):
    """Multiplies a step, behind the copies of a later one."""
    stages: gl.constexpr = product.tiling.stages
    following = step + stages - 1
    rows = look_up(operands[2], tile_m, following, product)
    async_copy.wait_group(stages - 2)
    # Into what the step before has read: the barrier that ends the wait is behind that.
    _start_copies(operands, smem, (slot + stages - 1) % stages, tile_m, tile_n, places, following, rows, product)
    return multiply_step(smem[0][slot], smem[1][slot], smem[2][slot], places, sums, product)


@gluon.jit
def multiply(values, metadata, columns, b, out, product: gl.constexpr):
    """Stores one tile of a product.

    See `Product`; `columns` has the lists, and is not read if v is 0.
    """
    tiling: gl.constexpr = product.tiling
    stages: gl.constexpr = tiling.stages
    operands = (values, metadata, columns, b)
    smem = allocate(b.dtype.element_ty, product)
    tile_m, tile_n = tile_of_block(product)
    places = _place_rows(columns, tile_m, tile_n, product)
    for slot in gl.static_range(stages - 1):
        rows = look_up(columns, tile_m, slot, product)
        _start_copies(operands, smem, slot, tile_m, tile_n, places, slot, rows, product)

    sums = mma_sp.zeros(tiling.tile_m, tiling.tile_n, tiling.warps_m, tiling.warps_n)
    rounds: gl.constexpr = product.steps // stages  # of the ring
    left: gl.constexpr = product.steps % stages
    for first in range(0, rounds * stages, stages):
        for slot in gl.static_range(stages):
            sums = _advance(operands, smem, slot, tile_m, tile_n, places, first + slot, sums, product)
    for slot in gl.static_range(left):
        sums = _advance(operands, smem, slot, tile_m, tile_n, places, rounds * stages + slot, sums, product)
    async_copy.wait_group(0)
    store_tile(mma_sp.to_tile(sums, tiling.warps_m, tiling.warps_n), out, tile_m, tile_n, product)
