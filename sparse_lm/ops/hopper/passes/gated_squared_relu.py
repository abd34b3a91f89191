"""Computes the 2:4 form of Y = relu(G)^2 U, and its gradient with the transposes of weight gradients, a pass each.

A block is one warpgroup and takes 64 tokens of 64 neurons. A neuron's gate and its own number, which stand side by
side in H, are the halves of one 32-bit word, and so are their gradients in shared memory, where they are read back by
columns to draw along tokens. Y lies in words beside them.

Numerics: float32, rounded once, then selected from or drawn: bit for bit the reference.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from sparse_lm.ops.checks import check_hidden_dtype
from sparse_lm.ops.compress import pad_to_tiles
from sparse_lm.ops.formats import TILE, HiddenGradients, HiddenStats, Sparse24
from sparse_lm.ops.hopper.frame import mvue, packed_24, shared_words
from sparse_lm.ops.hopper.frame.emit import (
    COMPILER_PARAMS,
    SCALAR,
    WARPGROUP_SIZE,
    f32,
    i32,
    i32_type,
    i64,
    load_words,
)
from sparse_lm.ops.hopper.frame.hidden_stats import Seen, store_stats
from sparse_lm.ops.hopper.frame.packed_24 import PackedPair
from sparse_lm.ops.hopper.frame.thread_tile import (
    HALVES,
    THREAD_COLUMNS,
    Thread,
    Tile,
    groups,
    nibbles,
    store_thread_columns,
)
from sparse_lm.ops.hopper.passes.squared_relu_24 import out_types
from sparse_lm.ops.mvue import threefry_key

_MAGNITUDES = 0x7FFF7FFF  # of the two 16-bit floats of a word


def gated_squared_relu_24(h: Array) -> tuple[Sparse24, HiddenStats]:
    """See `sparse_lm.ops.gated_squared_relu_24`.

    Raises:
      NotImplementedError: h is not of 16-bit floats, or its neurons are no multiple of 64.
    """
    neurons = _check(h)
    padded = pad_to_tiles(h)
    rows = padded.shape[0]

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 4, SCALAR, SCALAR))
    def sparsify_tile(_, h_gmem, values_gmem, metadata_gmem, stats_gmem, row, column):
        tile = Tile(Thread.current(), row.registers.item(), column.registers.item())
        element = ir.MemRefType(values_gmem.type).element_type
        seen, pairs = Seen.nothing(), []
        for words in _load_h(h_gmem, tile):
            y = [_gated(*words[first : first + 2], element) for first in range(0, len(words), 2)]
            pairs.append([packed_24.two_of_four(four, signed=True) for four in packed_24.groups(y)])
            magnitudes = [arith.andi(word, i32(_MAGNITUDES)) for word in y]
            seen = seen.add(magnitudes, [pair.values for pair in pairs[-1]], element)
        tile.store_packed(values_gmem, [[pair.values for pair in row] for row in pairs])
        tile.store_word(metadata_gmem, pairs)
        store_stats(stats_gmem, arith.addi(arith.muli(tile.row, i32(neurons // TILE)), tile.column), seen.stats())

    def kernel(h_gmem, values_gmem, metadata_gmem, stats_gmem):
        tile = lax.axis_index("row"), lax.axis_index("column")
        sparsify_tile(h_gmem, values_gmem, metadata_gmem, stats_gmem, *tile)

    values, metadata, stats = plgpu.kernel(
        kernel,
        out_type=out_types(rows, neurons, h.dtype),
        grid=(neurons // TILE, rows // TILE),
        grid_names=("column", "row"),
        compiler_params=COMPILER_PARAMS,
        kernel_name="gated_squared_relu_24",
    )(padded)
    return Sparse24(values, metadata, (h.shape[0], neurons)), HiddenStats(*jnp.sum(stats, axis=(0, 1)))


def gated_squared_relu_gradients(dy: Array, h: Array, y: Sparse24, *, key: Array) -> HiddenGradients:
    """See `sparse_lm.ops.gated_squared_relu_gradients`.

    Raises:
      NotImplementedError: dy, h or y is not of 16-bit floats of one dtype, or the neurons are no multiple of 64; or a
        key of another generator than JAX's default one.
    """
    neurons = _check(h)
    if not dy.dtype == y.dtype == h.dtype:
        raise NotImplementedError(f"needs dY, H and Y in one dtype, not {dy.dtype}, {h.dtype} and {y.dtype}")
    operands = pad_to_tiles(dy), pad_to_tiles(h), y.values, y.metadata, threefry_key(key)
    tokens = operands[0].shape[0]
    token_tiles, column_tiles = tokens // TILE, neurons // TILE

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 12, SCALAR, SCALAR))
    def differentiate_tile(_, dy, h, values, metadata, key, dh, dh_t, dh_t_words, y_t, y_t_words, *rest):
        dh_smem, y_smem, row, column = rest
        tile = Tile(Thread.current(), row.registers.item(), column.registers.item())
        thread = tile.thread
        _differentiate_rows(tile, (dy, h, values, metadata), dh, (dh_smem, y_smem), column_tiles)
        mgpu_utils.warpgroup_barrier()
        element, loaded_key = ir.MemRefType(dh.type).element_type, mvue.load_key(key)
        token = arith.addi(arith.muli(tile.row, i32(TILE)), thread.column)
        for half in HALVES:
            place = arith.addi(thread.row, i32(8 * half))
            neuron = arith.addi(arith.muli(tile.column, i32(TILE)), place)
            first_row = arith.muli(neuron, i32(2))
            gradients, ys = (shared_words.load_column(words, thread, place) for words in (dh_smem, y_smem))
            for member in range(2):
                out_row = arith.addi(first_row, i32(member))
                pairs = _draw(loaded_key, token, 2 * neurons, out_row, gradients, member, element)
                store_thread_columns(dh_t, dh_t_words, out_row, token, pairs)
            pairs = _draw(loaded_key, token, neurons, neuron, ys, 0, element)
            store_thread_columns(y_t, y_t_words, neuron, token, pairs)

    def kernel(*refs):
        differentiate_tile(*refs, lax.axis_index("row"), lax.axis_index("column"))

    def transpose_types(rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (
            jax.ShapeDtypeStruct((rows, tokens // 2), h.dtype),
            jax.ShapeDtypeStruct((rows // TILE, token_tiles, WARPGROUP_SIZE), jnp.int32),
        )

    dh, dh_t, dh_t_words, y_t, y_t_words = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((tokens, neurons), h.dtype),
            *transpose_types(2 * neurons),
            *transpose_types(neurons),
        ),
        grid=(column_tiles, token_tiles),
        grid_names=("column", "row"),
        scratch_types=[plgpu.SMEM((shared_words.COUNT,), jnp.int32)] * 2,
        compiler_params=COMPILER_PARAMS,
        kernel_name="gated_squared_relu_gradients",
    )(*operands)
    rows = h.shape[0]
    return HiddenGradients(
        Sparse24(dh, jnp.concatenate([y.metadata] * 2, axis=1), (rows, 2 * neurons)),
        Sparse24(dh_t, dh_t_words, (2 * neurons, rows)),
        Sparse24(y_t, y_t_words, (neurons, rows)),
    )


def _check(h: Array) -> int:
    """Returns the neurons of H [T, 2 F], if a kernel here takes it."""
    check_hidden_dtype(h.dtype)
    neurons = h.shape[1] // 2
    if neurons % TILE:
        raise NotImplementedError(f"needs a multiple of {TILE} neurons, not {neurons}")
    return neurons


def _load_h(h: ir.Value, tile: Tile) -> list[list[ir.Value]]:
    """Loads the numbers of the 16 neurons of both rows of a thread, a word each: the gate in its low half."""
    neurons = ir.MemRefType(h.type).shape[1] // 2
    return [load_words(h, arith.muli(tile.start(half, neurons), i64(2)), THREAD_COLUMNS) for half in HALVES]


def _gated(first: ir.Value, second: ir.Value, element: ir.Type) -> ir.Value:
    """Computes relu(g)^2 u of two neurons."""
    gates, owns = (packed_24.unpack(word, element) for word in packed_24.zip_halves(first, second))
    relus = [_relu(gate) for gate in gates]
    values = [arith.mulf(arith.mulf(relu, relu), own) for relu, own in zip(relus, owns, strict=True)]
    return packed_24.pack(*values, element)


def _differentiate_rows(
    tile: Tile,
    operands: tuple[ir.Value, ir.Value, ir.Value, ir.Value],
    dh: ir.Value,
    shared: tuple[ir.Value, ir.Value],
    column_tiles: int,
) -> None:
    """Writes dH of a thread's two rows to global memory, gates first; dH and Y, zeros where Y is not stored, to shared
    memory."""
    dy, h, values, metadata = operands
    element = ir.MemRefType(dy.type).element_type
    stored: tuple[list, list] = [], []  # of gates, of own numbers: the words of each row
    loaded = zip(
        tile.load_words(dy),
        _load_h(h, tile),
        tile.load_packed(values),
        nibbles(tile.load_word(metadata)),
        strict=True,
    )
    for half, (dy_words, h_words, y_words, row_nibbles) in enumerate(loaded):
        for rows in stored:
            rows.append([])
        for group, (y_word, nibble) in enumerate(zip(y_words, row_nibbles, strict=True)):
            positions = arith.andi(nibble, i32(3)), arith.shrui(nibble, i32(2))
            kept = [_one_of(h_words[4 * group : 4 * group + 4], position) for position in positions]
            dy_word = packed_24.take_two(dy_words[2 * group : 2 * group + 2], nibble)
            words = _gradients(dy_word, *packed_24.zip_halves(*kept), element)
            for rows, word in zip(stored, words, strict=True):
                rows[-1].append(word)
            row = arith.addi(tile.thread.row, i32(8 * half))
            column = arith.addi(tile.thread.column, i32(4 * group))
            for array, pair in zip(shared, (words, (y_word, i32(0))), strict=True):
                first = shared_words.pointer(array, row, column)  # a group's words are neighbours
                for member in range(4):
                    llvm.store(i32(0), mgpu_utils.getelementptr(first, [i32(member)], i32_type()))
                for position, word in zip(positions, packed_24.zip_halves(*pair), strict=True):
                    llvm.store(word, mgpu_utils.getelementptr(first, [position], i32_type()))
    for first_tile, rows in zip((0, column_tiles), stored, strict=True):
        Tile(tile.thread, tile.row, arith.addi(tile.column, i32(first_tile))).store_packed(dh, rows)


def _gradients(dy: ir.Value, gates: ir.Value, owns: ir.Value, element: ir.Type) -> tuple[ir.Value, ir.Value]:
    """Computes the gradients of two neurons' gates, (dy u) (2 relu(g)), and of their own numbers, dy relu(g)^2."""
    of_gates, of_owns = [], []
    for gradient, gate, own in zip(*(packed_24.unpack(word, element) for word in (dy, gates, owns)), strict=True):
        relu = _relu(gate)
        of_gates.append(arith.mulf(arith.mulf(gradient, own), arith.mulf(f32(2.0), relu)))
        of_owns.append(arith.mulf(gradient, arith.mulf(relu, relu)))
    return packed_24.pack(*of_gates, element), packed_24.pack(*of_owns, element)


def _relu(x: ir.Value) -> ir.Value:
    """Computes the larger of x and 0; NaN stays NaN."""
    return arith.maximumf(x, f32(0.0))


def _one_of(words: list[ir.Value], position: ir.Value) -> ir.Value:
    """Takes the word at a position, 0 to 3."""
    chosen = words[3]
    for number in (2, 1, 0):
        is_it = arith.cmpi(arith.CmpIPredicate.eq, position, i32(number))
        chosen = arith.select(is_it, words[number], chosen)
    return chosen


def _draw(
    key: tuple[ir.Value, ir.Value],
    token: ir.Value,
    rows: int,
    row: ir.Value,
    words: list[ir.Value],
    member: int,
    element: ir.Type,
) -> list[PackedPair]:
    """Draws (MVUE) from the low or the high halves of 16 tokens' words, for row `row` of a transpose of so many."""
    pairs = []
    for number, four in enumerate(groups(words)):
        if number % 2 == 0:
            pair_of_groups = arith.addi(arith.shrui(token, i32(3)), i32(number // 2))
            index = arith.addi(arith.muli(pair_of_groups, i32(rows)), row)
            above_one = mvue.uniform_above_one(mvue.random_bits(key, index))
        members = [packed_24.unpack(word, element)[member] for word in four]
        pair = mvue.sample_two(members, above_one[number % 2])
        pairs.append(PackedPair(packed_24.pack(pair.low, pair.high, element), pair.nibble))
    return pairs
