"""Computes the 2:4 form of Y = relu(H)^2 in one pass over memory.

Numerics: Y is squared in float32, rounded once, and then selected from: bit for bit the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from jax import Array
from jaxlib.mlir import ir

from sparse_lm.ops.checks import check_hidden_dtype
from sparse_lm.ops.compress import pad_to_tiles
from sparse_lm.ops.formats import HiddenStats, Sparse24, types_24
from sparse_lm.ops.hopper.frame import packed_24
from sparse_lm.ops.hopper.frame.emit import Number, element_of, shape_of
from sparse_lm.ops.hopper.frame.hidden_stats import Seen, stats_type, store_stats, sum_stats
from sparse_lm.ops.hopper.frame.thread_tile import Tile, run_by_tile
from sparse_lm.ops.hopper.frame.two_of_four import groups_of_four

_MAGNITUDES = 0x7FFF7FFF  # of the two 16-bit floats of a word


def squared_relu_24(h: Array) -> tuple[Sparse24, HiddenStats]:
    """See `sparse_lm.ops.squared_relu_24`; refuses an h that is not of 16-bit floats."""
    check_hidden_dtype(h.dtype)

    def load_y(h, tile):
        element = element_of(h)
        return ([packed_24.squared_relu(word, element) for word in words] for words in tile.load_words(h))

    return sparsify_hidden(h, h.shape[1], load_y, signed=False, name="squared_relu_24")


def sparsify_hidden(
    h: Array, neurons: int, load_y: Callable[[ir.Value, Tile], Iterable[list[Number]]], *, signed: bool, name: str
) -> tuple[Sparse24, HiddenStats]:
    """Selects from the Y [T, neurons] of which `load_y` makes the words of a thread's rows, from h in global memory.

    `signed` says whether Y may be negative.
    """

    def sparsify_tile(tile, h, values, metadata, stats):
        y, element, seen, pairs = load_y(h, tile), element_of(values), Seen.nothing(), []
        for words in y:
            members = [(word, half) for word in words for half in range(2)]
            pairs.append([packed_24.two_of_four(four, signed=signed) for four in groups_of_four(members)])
            magnitudes = [word & _MAGNITUDES for word in words] if signed else words
            seen = seen.add(magnitudes, [pair.values for pair in pairs[-1]], element)
        tile.store_24(values, metadata, pairs)
        store_stats(stats, tile.row * shape_of(metadata)[1] + tile.column, seen)

    shape = h.shape[0], neurons
    outs = types_24(*shape, h.dtype)
    tiles = outs[1].shape[:2]  # that the metadata describes
    outs = *outs, stats_type(math.prod(tiles))
    values, metadata, stats = run_by_tile(sparsify_tile, [pad_to_tiles(h)], outs, tiles, name=name)
    return Sparse24(values, metadata, shape), sum_stats(stats)
