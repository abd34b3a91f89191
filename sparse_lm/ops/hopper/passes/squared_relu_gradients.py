"""Computes dH = 2 sqrt(Y) dY where Y is stored, and the 2:4 forms of the transposes of dH and Y, in one pass.

A block is one warpgroup and takes 64 tokens of 64 (condensed) columns. It writes dH as it reads dY,
leaves dH and Y side by side in shared memory, one 32-bit word an element, and reads them back by
columns to select along tokens, or to draw. Of a Venom Y the transposes have a row for every neuron: a
block then writes the rows of its kept neurons, and rows of zeros for the others of its 16 groups. Neurons
of other groups would lie outside its shared memory, so the lists must have four of each group, in order. Y dY is
summed by tile, then by XLA.

Numerics: float32, rounded once. Square roots are `sqrt.approx.f32`, to which XLA lowers them on a GPU too: there
bit for bit the reference, while a CPU, whose square roots are rounded correctly, moves a few float16 by a unit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from sparse_lm.ops.checks import check_hidden_dtype, check_multiples
from sparse_lm.ops.formats import EMPTY_GROUP, TILE, HiddenGradients, Sparse24, SparseVenom, types_24
from sparse_lm.ops.hopper.frame import emit, mvue, packed_24, row_sums, shared_words
from sparse_lm.ops.hopper.frame.emit import WARPGROUP_SIZE, Number
from sparse_lm.ops.hopper.frame.operands import pad_to, round_up
from sparse_lm.ops.hopper.frame.packed_24 import PackedPair
from sparse_lm.ops.hopper.frame.thread_tile import HALVES, THREAD_COLUMNS, Tile, run_by_tile, store_thread_columns
from sparse_lm.ops.hopper.frame.two_of_four import groups_of_four, positions
from sparse_lm.ops.mvue import threefry_key

_NOT_KEPT = -1
_DH, _Y = 0, 1  # halves of a word


def squared_relu_gradients(
    dy: Array, y: Sparse24 | SparseVenom, *, key: Array | None = None, factor: Array | None = None
) -> HiddenGradients:
    """See `sparse_lm.ops.squared_relu_gradients`.

    It refuses dy and y that are not of 16-bit floats of one dtype; of a Venom y, a v that is no multiple of 64, an m
    that is no multiple of 4 or whose tiles of 16 groups do not divide its width, and columns that are contiguous, not
    four of each m; and a key of another generator than JAX's default one.
    """
    check_hidden_dtype(dy.dtype, y.dtype)
    padded, columns, tile_neurons = pad_to(dy, (y.values.shape[0], 2 * y.values.shape[1])), (), TILE
    keys = () if key is None else (threefry_key(key),)
    if isinstance(y, SparseVenom):
        if y.contiguous > 1:
            raise NotImplementedError(f"needs columns that are four of each {y.m}, not {y.contiguous} contiguous ones")
        # A block's tile has 64 columns, four of each m of so many neurons.
        columns, tile_neurons = (y.columns,), TILE // 4 * y.m
        check_multiples({"v": (y.v, TILE), "m": (y.m, 4), "F": (y.shape[1], tile_neurons)})
    tokens, kept = padded.shape
    factors = () if factor is None else (pad_to(factor, (tokens, 1)),)
    tiles = tokens // TILE, kept // TILE
    neurons = tiles[1] * tile_neurons

    def differentiate_tile(tile, dy_gmem, values_gmem, metadata_gmem, *rest):
        *optional_gmem, dh_gmem, dh_t_values, dh_t_words, y_t_values, y_t_words, sums_gmem, words, places = rest
        thread = tile.thread

        def neuron_at(tile_column):
            column = tile.column * TILE + tile_column
            if not columns:
                return column
            start = block.wide() * emit.shape_of(columns_gmem)[1] + column.wide()
            return emit.global_memory(columns_gmem).load(start)

        if columns:
            columns_gmem, block = optional_gmem[0], tile.row // (y.v // TILE)
            _invert(neuron_at, tile, places, tile_neurons)
        of_rows = [tile.load_by_row(ref) for ref in optional_gmem[len(columns) : len(columns) + len(factors)]]
        _differentiate_rows(tile, (dy_gmem, values_gmem, metadata_gmem), (dh_gmem, sums_gmem), words, of_rows)
        mgpu_utils.warpgroup_barrier()
        tile_columns = [thread.row + 8 * half for half in HALVES]
        out_rows = [neuron_at(tile_column) for tile_column in tile_columns]
        loaded = [shared_words.load_column(words, thread, tile_column) for tile_column in tile_columns]
        if keys:
            key_words, token = mvue.load_key(optional_gmem[-1]), tile.row * TILE + thread.column
            halves, element = (_DH, _Y), emit.element_of(dh_gmem)
            selected = [
                mvue.sample_halves(key_words, tokens, (token, row, neurons), halves, element)
                for row, tokens in zip(out_rows, loaded, strict=True)
            ]
        else:
            selected = [_select_along_tokens(tokens) for tokens in loaded]
        dh_pairs, y_pairs = zip(*selected, strict=True)
        outs = (dh_pairs, dh_t_values, dh_t_words), (y_pairs, y_t_values, y_t_words)
        if columns:
            _scatter_rows(outs, out_rows, places, tile, tile_neurons)
        else:
            transpose = Tile(thread, tile.column, tile.row)
            for pairs, out, out_words in outs:
                transpose.store_24(out, out_words, pairs)

    dh, *transposes, y_dy = run_by_tile(
        differentiate_tile,
        (padded, y.values, y.metadata, *columns, *factors, *keys),
        (
            types_24(tokens, kept, dy.dtype)[0],
            *types_24(neurons, tokens, dy.dtype) * 2,
            row_sums.sums_type(tiles),
        ),
        tiles,
        scratch=[
            plgpu.SMEM((shared_words.COUNT,), jnp.int32),
            plgpu.SMEM((-(-tile_neurons // WARPGROUP_SIZE) * WARPGROUP_SIZE,), jnp.int32),
        ],
        name="squared_relu_gradients",
    )
    # Rows of a ragged last block may be padded by more than a tile.
    width = round_up(y.shape[0])
    dh_t, y_t = (
        Sparse24(values[:, : width // 2], metadata[:, : width // TILE], y.shape[::-1])
        for values, metadata in zip(transposes[::2], transposes[1::2], strict=True)
    )
    return HiddenGradients(dataclasses.replace(y, values=dh), dh_t, y_t, jnp.sum(y_dy, axis=0)[: dy.shape[0]])


def _differentiate_rows(
    tile: Tile,
    operands: tuple[ir.Value, ...],
    out: tuple[ir.Value, ir.Value],
    words: ir.Value,
    factors: list[list[Number]],
):
    """Writes dH of a thread's two rows, and what they add to Y dY, to global memory; dH and Y to shared memory, zeros
    where Y is not stored.

    `factors` may have one entry, what to multiply the rows of dY by.
    """
    (dy, values, metadata), (dh, sums) = operands, out
    thread, dh_rows, y_dy = tile.thread, [], [emit.f32(0.0)] * 2
    loaded = zip(tile.load_words(dy), tile.load_packed(values), tile.load_nibbles(metadata), strict=True)
    for half, (dy_words, y_words, row_nibbles) in enumerate(loaded):
        dh_rows.append([])
        for group, (y_word, nibble) in enumerate(zip(y_words, row_nibbles, strict=True)):
            dy_word = packed_24.take_two(dy_words[2 * group : 2 * group + 2], nibble)
            for factor in factors:
                dy_word = packed_24.times(dy_word, factor[half], emit.element_of(dy))
            y_dy[half] = packed_24.add_products(y_dy[half], dy_word, y_word, emit.element_of(dy))
            dh_word = packed_24.squared_relu_gradient(dy_word, y_word, emit.element_of(dy))
            dh_rows[-1].append(dh_word)
            members = [
                shared_words.words_from(words, thread.row + 8 * half, thread.column + (4 * group + member))
                for member in range(4)
            ]
            for member in members:
                llvm.store(emit.i32(0), member.start)
            for position, word in zip(positions(nibble), packed_24.zip_halves(dh_word, y_word), strict=True):
                members[0].store(position, word)
    tile.store_packed(dh, dh_rows)
    row_sums.store_sums(sums, tile, y_dy)


def _select_along_tokens(tokens: list[Number]) -> tuple[list[PackedPair], list[PackedPair]]:
    """Selects pairs of dH and of Y of 16 tokens of a column: of each four the largest two."""
    dh_pairs, y_pairs = [], []
    for four in groups_of_four(tokens):
        dh_pairs.append(packed_24.two_of_four([(word, _DH) for word in four], signed=True))
        y_pairs.append(packed_24.two_of_four([(word, _Y) for word in four], signed=False))
    return dh_pairs, y_pairs


def _scatter_rows(outs, rows: list[Number], places: ir.Value, tile: Tile, tile_neurons: int) -> None:
    """Stores both columns' pairs in the rows of their neurons, and empty rows for the neurons that are not kept."""

    def store_row(values, metadata, neuron, pairs, condition=None):
        """Stores a thread's 16 tokens of one neuron."""
        store_thread_columns(values, metadata, neuron, tile.row * TILE + tile.thread.column, pairs, condition)

    nothing = [PackedPair(emit.i32(0), emit.i32(EMPTY_GROUP))] * (THREAD_COLUMNS // 4)
    for half in HALVES:
        for pairs, values, metadata in outs:
            store_row(values, metadata, rows[half], pairs[half])
        for first in range(0, tile_neurons, TILE):
            index = tile.thread.row + (8 * half + first)
            is_empty = emit.shared_memory(places).load(index).compare("eq", _NOT_KEPT)
            neuron = tile.column * tile_neurons + index
            for _, values, metadata in outs:
                store_row(values, metadata, neuron, nothing, is_empty)


def _invert(neuron_at: Callable[[Number], Number], tile: Tile, places: ir.Value, tile_neurons: int) -> None:
    """Sets `places[neuron - first neuron of the tile]` to its condensed column in the tile, or `_NOT_KEPT`."""
    shared = emit.shared_memory(places)
    for first in range(0, tile_neurons, WARPGROUP_SIZE):
        index = tile.thread.index + first
        shared.store(index, emit.i32(_NOT_KEPT))
    mgpu_utils.warpgroup_barrier()
    own = tile.thread.index % TILE  # two threads write the same
    neuron = neuron_at(own)
    shared.store(neuron - tile.column * tile_neurons, own)
