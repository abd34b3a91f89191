"""The kernel of all products with a 2:4 operand: a ring of shared-memory stages that `cp.async` keeps full.

A thread block computes one tile of the result, 64 logical k a step: what a word of metadata describes. Its threads
start the copies of a later step before the instructions of this one. Tiles of a band share the L2 cache, for which a
tile should be large and tall, because its 2:4 side is half as heavy. Where that does not limit, as on an H200, two
thread blocks of 128 x 128 side by side are as fast, or faster.

Numerics: float32 accumulation in the order of k; one rounding to the result's dtype. The same bits come out every
time.
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

from sparse_lm.ops.checks import product_dtype
from sparse_lm.ops.formats import TILE, Sparse24, SparseVenom
from sparse_lm.ops.triton.frame import mma_sp
from sparse_lm.ops.triton.frame.gluon_call import align_rows, gluon_call
from sparse_lm.ops.triton.frame.tiles import KEPT, WORDS, indices, rows_layout
from sparse_lm.ops.triton.frame.tiling import Tiling

_STEP = gl.constexpr(TILE)  # logical k
_VECTOR_BYTES = 16  # of a copy


@dataclasses.dataclass(frozen=True)
class Product:
    """Everything about a product that is known when its kernel is compiled."""

    name: str  # of the kernel
    m: int  # logical sizes of the product
    n: int
    k: int  # that of b
    rows: int  # of the arrays of a, the 2:4 operand
    steps: int  # of 64 along its columns
    b_stride: int  # elements between rows of b as it is stored, a multiple of 8; zeros from n (or k) on
    tiling: Tiling
    b_transposed: bool = False  # b is stored as [N, K]
    out_transposed: bool = False  # the result is stored as [N, M]
    lists: str = ""  # which rows blocks list: of "a", to compute them; of "b", to read them; of "out", to add to them
    v: int = 0  # size of a block, along N, M or K respectively
    contiguous: int = 0  # rows of "out" in a slice, which blocks list as a whole
    places: int = 0  # columns of the table of `row_order.inverted_index`, the last of which names no block

    @property
    def grid(self) -> tuple[int, int]:
        """Counts tiles along M and N."""
        return self.tiling.grid(self.m, self.n)


def multiply(
    name: str,
    a: Sparse24 | SparseVenom,
    b: Array,
    m: int,
    *,
    out_dtype: DTypeLike | None,
    tiling: Tiling,
    neuron_ids: Array | None = None,
    tables: tuple[Array, Array, Array] = (None, None, None),
    **options: Any,
) -> Array:
    """Multiplies a by b, [K, N] or transposed [N, K]; copies b if its rows are no multiple of 16 bytes.

    Args:
      m: rows of the result, which is [M, N], or transposed [N, M].
      out_dtype: of the result; that of b by default.
      neuron_ids: int32 [blocks, Kc], lists of rows of a or b.
      tables: for lists of rows of the result, places and counts of `row_order.inverted_index`, and int32 [M / tile_m],
        the tiles along M in the order in which they start.
      **options: attributes of `Product`.
    """
    out_dtype = product_dtype(a, b, out_dtype)
    n, k = b.shape if options.get("b_transposed") else b.shape[::-1]
    b = align_rows(b)
    product = Product(name, m, n, k, a.values.shape[0], a.metadata.shape[1], b.shape[1], tiling, **options)
    return gluon_call(
        multiply_kernel,
        *(a.values, a.metadata, neuron_ids, b, *tables),
        out=jax.ShapeDtypeStruct((n, m) if product.out_transposed else (m, n), out_dtype),
        blocks=math.prod(product.grid),
        warps=tiling.warps,
        product=product,
    )


@gluon.constexpr_function
def _copy_layout(length, element_bytes, warps, axis=1):
    """Returns the layout of a tile in copies of 16 bytes along an axis of this length."""
    vector = _VECTOR_BYTES // element_bytes
    return rows_layout(vector, length // vector, warps, axis)


@gluon.constexpr_function
def _b_layout(product):
    return _copy_layout(TILE if product.b_transposed else product.tiling.tile_n, 2, product.tiling.warps)


@gluon.constexpr_function
def _shared_layout(columns):
    """Returns the layout of a row-major tile of 16-bit numbers: a column's vectors of eight rows share no bank."""
    vectors = 2 * columns // _VECTOR_BYTES
    return gl.SwizzledSharedLayout(_VECTOR_BYTES // 2, max(1, 8 // vectors), min(8, vectors), [1, 0])


@gluon.jit
def _place_rows(neuron_ids, tile_m, tile_n, product: gl.constexpr):
    """Computes where a tile's listed rows of a are, for all of its steps.

    Returns:
      rows of the values [tile_m, 1]; offsets of the words that have the halves of rows g, and below them of rows
      g + 8, of each 16 listed ones [tile_m / 8, 32]; by how much to shift those words, twice, as fragments.
    """
    tiling: gl.constexpr = product.tiling
    first = tile_m * tiling.tile_m
    neuron_ids = neuron_ids + tile_n * tiling.tile_n // product.v * product.m
    row = gl.minimum(first + indices(tiling.tile_m, _copy_layout(KEPT, 2, tiling.warps), 0), product.m - 1)

    sixteens: gl.constexpr = tiling.tile_m // mma_sp.ROWS
    layout: gl.constexpr = rows_layout(1, 32, tiling.warps)
    half, lane = indices(2 * sixteens, layout, 0), indices(32, layout, 1)
    place = first + half % sixteens * 16 + half // sixteens * 8 + lane // 4
    neuron = gl.minimum(gl.load(neuron_ids + gl.minimum(place, product.m - 1)), product.rows - 1)
    word = neuron % _STEP // 16 * 32 + neuron % 8 * 4 + lane % 4

    words: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, mma_sp.fragment_layout(tiling)))
    place = first + indices(sixteens, words, 0) * 16 + indices(32, words, 1) // 4
    low = gl.load(neuron_ids + gl.minimum(place, product.m - 1)) % 16 // 8 * 16
    high = gl.load(neuron_ids + gl.minimum(place + 8, product.m - 1)) % 16 // 8 * 16
    return gl.load(neuron_ids + row), neuron // _STEP * (product.steps * WORDS) + word, low, high


@gluon.jit
def _copy_a(values, metadata, values_smem, words_smem, tile, of_tile, step, product: gl.constexpr):
    """Copies rows and words of a in a step; past the last step, zeros.

    Past the last row, those of the last one are copied, or zeros if rows are listed. Words of zeros would be no
    metadata: past the last step, the last one's are copied again. If rows are listed none are, since such steps are
    copied, but never multiplied.
    """
    tiling: gl.constexpr = product.tiling
    live = step < product.steps
    layout: gl.constexpr = _copy_layout(KEPT, 2, tiling.warps)
    stride: gl.constexpr = product.steps * KEPT
    if product.lists == "a":
        row, offset, _, _ = of_tile
        column = indices(KEPT, layout, 1)
        source = values + step * KEPT + row.to(gl.int64) * stride + column
        async_copy.async_copy_global_to_shared(values_smem, source, mask=live & (row < product.rows))
        async_copy.async_copy_global_to_shared(words_smem, metadata + step * WORDS + offset, mask=live & (offset >= 0))
    else:
        row, column = indices(tiling.tile_m, layout, 0), indices(KEPT, layout, 1)
        if product.rows % tiling.tile_m != 0:
            row = gl.minimum(row, product.rows - 1 - tile * tiling.tile_m)
        origin = values + (tile * tiling.tile_m).to(gl.int64) * stride + step * KEPT
        async_copy.async_copy_global_to_shared(values_smem, origin + (row * stride + column), mask=live & (row >= 0))

        sixteens: gl.constexpr = tiling.tile_m // mma_sp.ROWS
        words_layout: gl.constexpr = _copy_layout(32, 4, tiling.warps)
        sixteen, lane = indices(sixteens, words_layout, 0), indices(32, words_layout, 1)
        if product.rows % tiling.tile_m != 0:
            sixteen = gl.minimum(sixteen, product.rows // mma_sp.ROWS - 1 - tile * sixteens)
        origin = metadata + (tile * (sixteens // 4)).to(gl.int64) * (product.steps * WORDS)
        origin += gl.minimum(step, product.steps - 1) * WORDS
        offset = sixteen // 4 * (product.steps * WORDS) + sixteen % 4 * 32 + lane
        async_copy.async_copy_global_to_shared(words_smem, origin + offset, mask=sixteen >= 0)


@gluon.jit
def _copy_b(b, b_smem, rows, tile, product: gl.constexpr):
    """Copies the rows of b that `_look_up` gave, in a tile's columns; zeros past the last of either.

    Masks end at whole vectors: at the ends of rows b has zeros.
    """
    layout: gl.constexpr = _b_layout(product)
    tile_n: gl.constexpr = product.tiling.tile_n
    stride: gl.constexpr = product.b_stride
    if product.b_transposed:
        k, n = indices(_STEP, layout, 1), indices(tile_n, layout, 0)
        source = b + (tile * tile_n).to(gl.int64) * stride + rows + (n * stride + k)
        inside = (k < stride - rows) & (n < product.n - tile * tile_n)
    elif product.lists == "b":
        n = indices(tile_n, layout, 1)
        source = b + tile * tile_n + rows.to(gl.int64) * stride + n
        inside = (rows < product.k) & (n < stride - tile * tile_n)
    else:
        k, n = indices(_STEP, layout, 0), indices(tile_n, layout, 1)
        source = b + rows.to(gl.int64) * stride + tile * tile_n + (k * stride + n)
        inside = (k < product.k - rows) & (n < stride - tile * tile_n)
    async_copy.async_copy_global_to_shared(b_smem, source, mask=inside)


@gluon.jit
def _look_up(lists, tile, of_tile, step, product: gl.constexpr):
    """Looks up where a step of a tile of the result is.

    Returns:
      (tile of a, step along it, rows of b: the first of 64, or if they are listed all, past their ends no row, `k`); or
      if the result's rows are listed, (listing of a block, step along a, past the last if no block lists the slice).
    """
    if product.lists == "b":
        listed: gl.constexpr = product.steps * _STEP
        block = tile * product.tiling.tile_m // product.v
        place = step * _STEP + indices(_STEP, _b_layout(product), 0)
        return tile, step, gl.load(lists + block * listed + place, mask=place < listed, other=product.k)
    elif product.lists == "out":
        steps: gl.constexpr = product.v // _STEP  # of a block
        slices: gl.constexpr = product.rows // product.contiguous  # that a block lists
        place = gl.load(lists + of_tile[0] * product.places + gl.minimum(step // steps, product.places - 1))
        return place % slices, place // slices * steps + step % steps
    else:
        return tile, step, gl.to_tensor(step) * _STEP


@gluon.jit
def _start_copies(operands, smem, slot: gl.constexpr, at, tile_n, of_tile, product: gl.constexpr):
    values, metadata, b, _ = operands
    values_smem, words_smem, b_smem = smem
    tile, step = at[0], at[1]
    if product.lists == "out":
        tile = tile * (product.contiguous // product.tiling.tile_m) + of_tile[1]
    _copy_a(values, metadata, values_smem[slot], words_smem[slot], tile, of_tile, step, product)
    _copy_b(b, b_smem[slot], step * _STEP if product.lists == "out" else at[2], tile_n, product)
    async_copy.commit_group()


@gluon.jit
def _advance(operands, smem, slot: gl.constexpr, tile_m, tile_n, of_tile, step, sums, product: gl.constexpr):
    """Multiplies a step, behind the copies of a later one."""
    tiling: gl.constexpr = product.tiling
    at = _look_up(operands[3], tile_m, of_tile, step + tiling.stages - 1, product)
    async_copy.wait_group(tiling.stages - 2)
    # Into what the step before has read: the barrier that ends the wait is behind that.
    _start_copies(operands, smem, (slot + tiling.stages - 1) % tiling.stages, at, tile_n, of_tile, product)

    values, words, b = smem[0][slot], smem[1][slot], smem[2][slot]
    if product.lists == "a":
        sixteens: gl.constexpr = tiling.tile_m // mma_sp.ROWS
        low = mma_sp.load_words(words.slice(0, sixteens), tiling)
        high = mma_sp.load_words(words.slice(sixteens, sixteens), tiling)
        low, high = low >> of_tile[2].expand_dims(1).expand_dims(3), high >> of_tile[3].expand_dims(1).expand_dims(3)
        words = low & 0xFFFF | high << 16
    else:
        words = mma_sp.load_words(words, tiling)
    if product.b_transposed:
        b = b.permute([1, 0])
    for half in gl.static_range(2):
        a = mma_sp.load_a(values.slice(half * mma_sp.KEPT, mma_sp.KEPT, dim=1), tiling)
        left, right = mma_sp.load_b(b.slice(half * mma_sp.STEP, mma_sp.STEP, dim=0), tiling)
        sums = mma_sp.mma_sp(a, left, right, words, sums, half)
    return sums


@gluon.jit
def _store(tile, out, tile_m, tile_n, product: gl.constexpr):
    """Rounds once and stores, by way of shared memory, whole vectors along the result's rows as they are stored."""
    tiling: gl.constexpr = product.tiling
    tile = tile.to(out.dtype.element_ty)
    axis: gl.constexpr = 0 if product.out_transposed else 1
    length: gl.constexpr = tiling.tile_m if product.out_transposed else tiling.tile_n
    layout: gl.constexpr = _copy_layout(length, out.dtype.element_ty.primitive_bitwidth // 8, tiling.warps, axis)
    row = tile_m * tiling.tile_m + indices(tiling.tile_m, layout, 0)
    column = tile_n * tiling.tile_n + indices(tiling.tile_n, layout, 1)
    if product.out_transposed:
        target = out + column.to(gl.int64) * product.m + row
    else:
        target = out + row.to(gl.int64) * product.n + column
    inside = (row < product.m) & (column < product.n)
    gl.store(target, gl.convert_layout(tile, layout), mask=inside)


@gluon.jit(repr=lambda call: call.constants["product"].name)
def multiply_kernel(values, metadata, neuron_ids, b, places, counts, order, out, product: gl.constexpr):
    """Stores one tile of a product. See `multiply`; tables that `product.lists` has no need of are None."""
    tiling: gl.constexpr = product.tiling
    stages: gl.constexpr = tiling.stages
    grid: gl.constexpr = product.grid
    b_shape: gl.constexpr = [tiling.tile_n, _STEP] if product.b_transposed else [_STEP, tiling.tile_n]
    sixteens: gl.constexpr = tiling.tile_m // mma_sp.ROWS * (2 if product.lists == "a" else 1)
    words_layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])  # a warp reads one whole row, of all banks
    smem_values, smem_words, smem_b = (), (), ()  # each for itself, so that the compiler can tell them apart
    for _ in gl.static_range(stages):
        smem_values += (gl.allocate_shared_memory(b.dtype.element_ty, [tiling.tile_m, KEPT], _shared_layout(KEPT)),)
        smem_words += (gl.allocate_shared_memory(gl.int32, [sixteens, 32], words_layout),)
        smem_b += (gl.allocate_shared_memory(b.dtype.element_ty, b_shape, _shared_layout(b_shape[1])),)
    smem = smem_values, smem_words, smem_b

    number = gl.program_id(0)
    if product.lists == "out":
        tile_m, tile_n = gl.load(order + number // grid[1]), number % grid[1]
    else:  # down a band of `raster_width` tiles first
        band_size: gl.constexpr = tiling.raster_width * grid[1]
        first = number // band_size * tiling.raster_width
        width = gl.minimum(grid[0] - first, tiling.raster_width)
        tile_m, tile_n = first + number % band_size % width, number % band_size // width
    of_tile = ()  # what holds for all of its steps
    if product.lists == "a":
        of_tile = _place_rows(neuron_ids, tile_m, tile_n, product)
    elif product.lists == "out":
        tiles: gl.constexpr = product.contiguous // tiling.tile_m  # of a slice
        of_tile = tile_m // tiles, tile_m % tiles
    operands = values, metadata, b, places if product.lists == "out" else neuron_ids
    for slot in gl.static_range(stages - 1):
        at = _look_up(operands[3], tile_m, of_tile, slot, product)
        _start_copies(operands, smem, slot, at, tile_n, of_tile, product)

    sums = mma_sp.zeros(tiling)
    if product.lists == "out":
        # Steps past a slice's last one, which fill up the last round of the ring, multiply zeros.
        whole_rounds = gl.load(counts + of_tile[0]) * (product.v // _STEP)
        left: gl.constexpr = 0
    else:
        whole_rounds: gl.constexpr = product.steps // stages * stages
        left: gl.constexpr = product.steps % stages
    for first in range(0, whole_rounds, stages):
        for slot in gl.static_range(stages):
            sums = _advance(operands, smem, slot, tile_m, tile_n, of_tile, first + slot, sums, product)
    for slot in gl.static_range(left):
        sums = _advance(operands, smem, slot, tile_m, tile_n, of_tile, whole_rounds + slot, sums, product)
    async_copy.wait_group(0)
    _store(mma_sp.to_tile(sums, tiling), out, tile_m, tile_n, product)
