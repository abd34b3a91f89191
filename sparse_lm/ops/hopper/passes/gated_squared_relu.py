"""Computes the 2:4 form of Y = relu(G)^2 U, and its gradient with the transposes of weight gradients, a pass each.

A block is one warpgroup and takes 64 tokens of 64 neurons. A neuron's gate and its own number, which stand side by
side in H, are the halves of one 32-bit word, and so are their gradients in shared memory, where they are read back by
columns to draw along tokens. Y lies in words beside them. Y dY is summed by tile, then by XLA.

Numerics: float32, rounded once, then selected from or drawn: bit for bit the reference.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from sparse_lm.ops.checks import check_hidden_dtype, check_multiples
from sparse_lm.ops.compress import pad_to_tiles
from sparse_lm.ops.formats import TILE, HiddenGradients, HiddenStats, Sparse24, types_24
from sparse_lm.ops.hopper.frame import mvue, packed_24, row_sums, shared_words
from sparse_lm.ops.hopper.frame.emit import Number, element_of, f32, i32, load_words, maximum, select, shape_of
from sparse_lm.ops.hopper.frame.thread_tile import HALVES, THREAD_COLUMNS, Tile, run_by_tile, store_thread_columns
from sparse_lm.ops.hopper.frame.two_of_four import positions
from sparse_lm.ops.hopper.passes.squared_relu_24 import sparsify_hidden
from sparse_lm.ops.mvue import threefry_key


def gated_squared_relu_24(h: Array) -> tuple[Sparse24, HiddenStats]:
    """See `sparse_lm.ops.gated_squared_relu_24`; refuses all but 16-bit floats, and an F that is no multiple of 64."""
    return sparsify_hidden([h], _check(h), _gated_squared_relu, signed=True, name="gated_squared_relu_24")


def gated_squared_relu_gradients(dy: Array, h: Array, y: Sparse24, *, key: Array) -> HiddenGradients:
    """See `sparse_lm.ops.gated_squared_relu_gradients`; refuses what `gated_squared_relu_24` does, dtypes that differ,
    and keys of another generator than JAX's default one."""
    neurons = _check(h, dy.dtype, y.dtype)
    operands = pad_to_tiles(dy), pad_to_tiles(h), y.values, y.metadata, threefry_key(key)
    tokens = operands[0].shape[0]

    def differentiate_tile(
        tile, dy, h, values, metadata, key, dh, dh_t, dh_t_words, y_t, y_t_words, sums, dh_smem, y_smem
    ):
        thread, element = tile.thread, element_of(dh)
        _differentiate_rows(tile, (dy, h, values, metadata), (dh, sums), (dh_smem, y_smem))
        mgpu_utils.warpgroup_barrier()
        loaded_key = mvue.load_key(key)
        token = tile.row * TILE + thread.column

        def draw(rows, row, words, half):
            """Draws from the low or the high halves of 16 tokens' words, for a row of a transpose of so many."""
            return mvue.sample_halves(loaded_key, words, (token, row, rows), (half,), element)[0]

        for half in HALVES:
            place = thread.row + 8 * half
            neuron = tile.column * TILE + place
            first_row = neuron * 2
            gradients, ys = (shared_words.load_column(words, thread, place) for words in (dh_smem, y_smem))
            for member in range(2):
                out_row = first_row + member
                pairs = draw(2 * neurons, out_row, gradients, member)
                store_thread_columns(dh_t, dh_t_words, out_row, token, pairs)
            store_thread_columns(y_t, y_t_words, neuron, token, draw(neurons, neuron, ys, 0))

    tiles = tokens // TILE, neurons // TILE
    transposes = *types_24(2 * neurons, tokens, h.dtype), *types_24(neurons, tokens, h.dtype)
    dh, dh_t, dh_t_words, y_t, y_t_words, y_dy = run_by_tile(
        differentiate_tile,
        operands,
        (types_24(tokens, 2 * neurons, h.dtype)[0], *transposes, row_sums.sums_type(tiles)),
        tiles,
        scratch=[plgpu.SMEM((shared_words.COUNT,), jnp.int32)] * 2,
        name="gated_squared_relu_gradients",
    )
    rows = h.shape[0]
    return HiddenGradients(
        Sparse24(dh, jnp.concatenate([y.metadata] * 2, axis=1), (rows, 2 * neurons)),
        Sparse24(dh_t, dh_t_words, (2 * neurons, rows)),
        Sparse24(y_t, y_t_words, (neurons, rows)),
        jnp.sum(y_dy, axis=0)[:rows],
    )


def _check(h: Array, *dtypes: jnp.dtype) -> int:
    """Returns the neurons of H [T, 2 F], if a kernel here takes it with others of these dtypes."""
    check_hidden_dtype(h.dtype, *dtypes)
    neurons = h.shape[1] // 2
    check_multiples({"F": (neurons, TILE)})
    return neurons


def _load_h(h: ir.Value, tile: Tile) -> list[list[Number]]:
    """Loads the numbers of the 16 neurons of both rows of a thread, a word each: the gate in its low half."""
    neurons = shape_of(h)[1] // 2
    return [load_words(h, tile.start(half, neurons) * 2, THREAD_COLUMNS) for half in HALVES]


def _gated_squared_relu(tile: Tile, h: ir.Value) -> Iterator[list[Number]]:
    """Yields the words of Y of both rows of a thread."""
    for words in _load_h(h, tile):
        yield [_gated(*words[first : first + 2], element_of(h)) for first in range(0, len(words), 2)]


def _gated(first: Number, second: Number, element: ir.Type) -> Number:
    """Computes relu(g)^2 u of two neurons."""
    gates, owns = (packed_24.unpack(word, element) for word in packed_24.zip_halves(first, second))
    relus = [maximum(gate, f32(0.0)) for gate in gates]
    return packed_24.pack(*(relu * relu * own for relu, own in zip(relus, owns, strict=True)), element)


def _differentiate_rows(
    tile: Tile, operands: tuple[ir.Value, ...], out: tuple[ir.Value, ir.Value], shared: tuple[ir.Value, ir.Value]
) -> None:
    """Writes dH of a thread's two rows, gates first, and what they add to Y dY; and to shared memory dH and Y, zeros
    where Y is not stored."""
    (dy, h, values, metadata), (dh, sums) = operands, out
    element, thread = element_of(dy), tile.thread
    y_dy = [f32(0.0)] * 2
    stored = []  # of each row and group, two words: the gradients of the gates, and of the own numbers
    rows_nibbles = tile.load_words(dy), _load_h(h, tile), tile.load_packed(values), tile.load_nibbles(metadata)
    for half, (dy_words, h_words, y_words, row_nibbles) in enumerate(zip(*rows_nibbles, strict=True)):
        stored.append([])
        for group, (y_word, nibble) in enumerate(zip(y_words, row_nibbles, strict=True)):
            kept_at = positions(nibble)
            kept = [_one_of(h_words[4 * group : 4 * group + 4], position) for position in kept_at]
            dy_word = packed_24.take_two(dy_words[2 * group : 2 * group + 2], nibble)
            y_dy[half] = packed_24.add_products(y_dy[half], dy_word, y_word, element)
            words = _gradients(dy_word, *packed_24.zip_halves(*kept), element)
            stored[-1].append(words)
            row, column = thread.row + 8 * half, thread.column + 4 * group
            for array, pair in zip(shared, (words, (y_word, i32(0))), strict=True):
                members = shared_words.words_from(array, row, column)
                for member in range(4):
                    llvm.store(i32(0), members.at(i32(member)))
                for position, word in zip(kept_at, packed_24.zip_halves(*pair), strict=True):
                    members.store(position, word)
    for number, first_tile in enumerate((0, shape_of(dh)[1] // TILE)):
        rows = [[words[number] for words in row] for row in stored]
        Tile(thread, tile.row, tile.column + first_tile).store_packed(dh, rows)
    row_sums.store_sums(sums, tile, y_dy)


def _gradients(dy: Number, gates: Number, owns: Number, element: ir.Type) -> tuple[Number, Number]:
    """Computes the gradients of two neurons' gates, (dy u) (2 relu(g)), and of their own numbers, dy relu(g)^2."""
    of_gates, of_owns = [], []
    for gradient, gate, own in zip(*(packed_24.unpack(word, element) for word in (dy, gates, owns)), strict=True):
        relu = maximum(gate, f32(0.0))
        of_gates.append(gradient * own * (f32(2.0) * relu))
        of_owns.append(gradient * (relu * relu))
    return packed_24.pack(*of_gates, element), packed_24.pack(*of_owns, element)


def _one_of(words: list[Number], position: Number) -> Number:
    """Takes the word at a position, 0 to 3."""
    chosen = words[3]
    for number in (2, 1, 0):
        chosen = select(position.compare("eq", number), words[number], chosen)
    return chosen
