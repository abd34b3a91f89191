"""Computes dH of dY, its transpose, 2:4 along tokens at random, and with a gate Y, in one pass over memory.

A block is one warpgroup and takes 64 tokens of 64 columns of H: of 64 neurons, or with gates of 32, a gate and its own
number side by side. It writes dH as it reads, leaves it in shared memory, one 32-bit word an element, and reads it back
by columns to draw. Bytes, of F neurons, 16-bit floats: 7.125 T F, with gates 14.25 T F.

Numerics: float32, rounded once; exponentials and reciprocals are the approximate ones of the hardware, to a few units
of float32. The transpose is drawn from dH as rounded: bit for bit `sparsify_24`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import e as euler
from math import log2, pi, sqrt

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir

from sparse_lm.ops import reference
from sparse_lm.ops.activations import SQUARED_RELU
from sparse_lm.ops.checks import check_hidden_dtype
from sparse_lm.ops.compress import pad_to_tiles
from sparse_lm.ops.formats import TILE, Sparse24, types_24
from sparse_lm.ops.hopper.frame import emit, mvue, packed_24, shared_words
from sparse_lm.ops.hopper.frame.emit import Number, f32
from sparse_lm.ops.hopper.frame.thread_tile import HALVES, THREAD_COLUMNS, Tile, run_by_tile
from sparse_lm.ops.hopper.passes.sparsify_24 import sparsify_24
from sparse_lm.ops.mvue import threefry_key

_WORDS = THREAD_COLUMNS // 2  # of a thread's row, two elements each


def hidden_gradients(dy: Array, saved: Array, activation: str, *, key: Array) -> tuple[Array, Sparse24, Array]:
    """See `sparse_lm.ops.hidden_gradients`.

    It refuses dtypes that are no 16-bit floats, and a key of another generator than JAX's default one. If F is no
    multiple of 64, XLA computes all but the transpose.
    """
    check_hidden_dtype(dy.dtype, saved.dtype)
    if dy.shape[1] % TILE:
        return reference.hidden_gradients(dy, saved, activation, key=key, sparsify=sparsify_24)
    (tokens, width), gated = saved.shape, activation != SQUARED_RELU
    operands = pad_to_tiles(dy), pad_to_tiles(saved), threefry_key(key)
    padded = operands[1].shape[0]

    def differentiate_tile(tile, dy, saved, key, dh, dh_t, dh_t_words, *rest):
        *y, words = rest
        thread, element = tile.thread, emit.element_of(dh)
        _differentiate_rows(tile, (dy, saved), (dh, *y), words, activation)
        mgpu_utils.warpgroup_barrier()
        loaded_key = mvue.load_key(key)
        token, pairs = tile.row * TILE + thread.column, []
        for half in HALVES:
            column = thread.row + 8 * half
            row = tile.column * TILE + column
            of_tokens = shared_words.load_column(words, thread, column)
            pairs += mvue.sample_halves(loaded_key, of_tokens, (token, row, width), (0,), element)
        Tile(thread, tile.column, tile.row).store_24(dh_t, dh_t_words, pairs)

    dh, values, metadata, *y = run_by_tile(
        differentiate_tile,
        operands,
        [
            jax.ShapeDtypeStruct((padded, width), dy.dtype),
            *types_24(width, padded, dy.dtype),
            *[jax.ShapeDtypeStruct((padded, width // 2), dy.dtype)] * gated,
        ],
        (padded // TILE, width // TILE),
        scratch=[plgpu.SMEM((shared_words.COUNT,), jnp.int32)],
        name="hidden_gradients",
    )
    return dh[:tokens], Sparse24(values, metadata, (width, tokens)), y[0][:tokens] if gated else saved


def _differentiate_rows(
    tile: Tile, operands: tuple[ir.Value, ...], outs: tuple[ir.Value, ...], words: ir.Value, activation: str
) -> None:
    """Writes dH, and Y if it is among `outs`, of a thread's two rows, and dH to shared memory."""
    dy, saved = operands
    element, width = emit.element_of(saved), emit.shape_of(saved)[1]
    for half in HALVES:
        start = tile.start(half, width)
        saved_words = emit.load_words(saved, start, _WORDS)
        if activation == SQUARED_RELU:
            dy_words = emit.load_words(dy, start, _WORDS)
            pairs = zip(dy_words, saved_words, strict=True)
            dh_words = [packed_24.squared_relu_gradient(*pair, element) for pair in pairs]
        else:
            start_of_y = tile.start(half, width) >> 1
            dy_words = emit.load_words(dy, start_of_y, _WORDS // 2)
            dh_words, y_words = _gated_row(dy_words, saved_words, GATES[activation], element)
            emit.store_words(outs[1], start_of_y, y_words)
        emit.store_words(outs[0], start, dh_words)
        for number, word in enumerate(dh_words):
            place = shared_words.words_from(words, tile.thread.row + 8 * half, tile.thread.column + 2 * number)
            place.store(emit.i32(0), word)
            place.store(emit.i32(1), word >> 16)


def _gated_row(dy: list[Number], h: list[Number], gate: Gate, element: ir.Type) -> tuple[list[Number], list[Number]]:
    """Computes words of dH and of Y = f(G) U: dY U f'(G) and dY f(G) by turns."""
    gradients = [number for word in dy for number in packed_24.unpack(word, element)]
    dh_words, ys = [], []
    for gradient, word in zip(gradients, h, strict=True):
        g, own = packed_24.unpack(word, element)
        value, slope = gate(g)
        dh_words.append(packed_24.pack(gradient * own * slope, gradient * value, element))
        ys.append(value * own)
    return dh_words, [packed_24.pack(*ys[i : i + 2], element) for i in range(0, len(ys), 2)]


Gate = Callable[[Number], tuple[Number, Number]]
"""Computes f(g) and f'(g)."""


def _squared_relu(g: Number) -> tuple[Number, Number]:
    relu = emit.maximum(g, f32(0.0))
    return relu * relu, relu * 2.0


def _silu(g: Number) -> tuple[Number, Number]:
    return _times_logistic(g, g, f32(1.0))


def _gelu(g: Number) -> tuple[Number, Number]:
    # By tanh: (1 + tanh(z / 2)) / 2 is the logistic function of z.
    factor, square = 2 * sqrt(2 / pi), g * g
    return _times_logistic(g, g * (square * (0.044715 * factor) + factor), square * (3 * 0.044715 * factor) + factor)


def _times_logistic(g: Number, z: Number, slope: Number) -> tuple[Number, Number]:
    """Computes g s(z) and its derivative s + g s (1 - s) z', of a z(g) with this slope, s = 1 / (1 + exp(-z))."""
    exponential = emit.ptx("ex2.approx.f32 $0, $1;", "=f,f", [z * -log2(euler)], ir.F32Type.get())
    share = Number(emit.ptx("rcp.approx.f32 $0, $1;", "=f,f", [Number(exponential) + 1.0], ir.F32Type.get()))
    value = g * share
    return value, share + (value - value * share) * slope


GATES: dict[str, Gate] = {"swiglu": _silu, "geglu": _gelu, "gated_relu2": _squared_relu}
