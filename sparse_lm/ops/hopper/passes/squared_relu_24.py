"""Computes the 2:4 form of Y = relu(H)^2 in one pass over memory.

Numerics: Y is squared in float32, rounded once, and then selected from: bit for bit the reference.
What selection saw is summed in float32 (hidden_stats.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxlib.mlir import ir

from sparse_lm.ops.checks import check_hidden_dtype
from sparse_lm.ops.compress import pad_to_tiles
from sparse_lm.ops.formats import HiddenStats, Sparse24, types_24
from sparse_lm.ops.hopper.frame import packed_24
from sparse_lm.ops.hopper.frame.emit import Number, element_of, shape_of
from sparse_lm.ops.hopper.frame.hidden_stats import Seen, stats_type, store_stats, sum_stats
from sparse_lm.ops.hopper.frame.thread_tile import Tile, run_by_tile

_MAGNITUDES = 0x7FFF7FFF  # of the two 16-bit floats of a word


def squared_relu_24(h: Array) -> tuple[Sparse24, HiddenStats]:
    """See `sparse_lm.ops.squared_relu_24`; refuses an h that is not of 16-bit floats."""
    check_hidden_dtype(h.dtype)

    def load_y(h, tile):
        return squared_relu(tile.load_words(h), element_of(h))

    return sparsify_hidden(h, h.shape[1], load_y, signed=False, name="squared_relu_24")


def sparsify_hidden(
    h: Array, neurons: int, load_y: Callable[[ir.Value, Tile], Iterable[list[Number]]], *, signed: bool, name: str
) -> tuple[Sparse24, HiddenStats]:
    """Selects from the Y [T, neurons] of which `load_y` makes the words of a thread's rows, from h in global memory."""

    def sparsify_tile(tile, h, *outs):
        store_selected(load_y(h, tile), tile, *outs, signed=signed)

    shape = h.shape[0], neurons
    outs = out_types(*shape, h.dtype)
    tiles = outs[1].shape[:2]  # that the metadata describes
    values, metadata, stats = run_by_tile(sparsify_tile, [pad_to_tiles(h)], outs, tiles, name=name)
    return Sparse24(values, metadata, shape), sum_stats(stats)


def out_types(rows: int, columns: int, dtype: jnp.dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types that `store_selected` fills: values, metadata, each warp's statistics of a tile."""
    values, metadata = types_24(rows, columns, dtype)
    return values, metadata, stats_type(math.prod(metadata.shape[:2]))


def squared_relu(h: Sequence[Sequence[Number]], element: ir.Type) -> Iterable[list[Number]]:
    """Yields the words of Y of a thread's rows, from those of H."""
    return ([packed_24.squared_relu(word, element) for word in words] for words in h)


def store_selected(
    y: Iterable[Sequence[Number]], tile: Tile, values: ir.Value, metadata: ir.Value, stats: ir.Value, *, signed: bool
) -> None:
    """Selects from the words of a thread's two rows of Y, made row by row, and stores what is kept and what was seen.

    The arrays in global memory are of `out_types`; `signed` says whether Y may be negative.
    """
    element = element_of(values)
    seen, pairs = Seen.nothing(), []
    for words in y:
        pairs.append([packed_24.two_of_four(four, signed=signed) for four in packed_24.groups(words)])
        magnitudes = [word & _MAGNITUDES for word in words] if signed else words
        seen = seen.add(magnitudes, [pair.values for pair in pairs[-1]], element)
    tile.store_24(values, metadata, pairs)
    store_stats(stats, tile.row * shape_of(metadata)[1] + tile.column, seen)
