"""Computes the 2:4 form of Y = relu(H)^2 in one pass over memory.

Numerics: Y is squared in float32, rounded once, and then selected from: bit for bit the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp
from jax import Array

from sparse_lm.ops.checks import check_hidden_dtype
from sparse_lm.ops.compress import pad_to_tiles
from sparse_lm.ops.formats import TILE, HiddenStats, Sparse24, types_24
from sparse_lm.ops.hopper.frame import packed_24
from sparse_lm.ops.hopper.frame.emit import Number, element_of, shape_of
from sparse_lm.ops.hopper.frame.hidden_stats import Seen, stats_type, store_stats
from sparse_lm.ops.hopper.frame.operands import pad_to
from sparse_lm.ops.hopper.frame.thread_tile import run_by_tile
from sparse_lm.ops.hopper.frame.two_of_four import groups_of_four

_MAGNITUDES = 0x7FFF7FFF  # of the two 16-bit floats of a word


def squared_relu_24(h: Array, *, factor: Array | None = None) -> tuple[Sparse24, HiddenStats]:
    """See `sparse_lm.ops.squared_relu_24`; refuses an h that is not of 16-bit floats."""
    check_hidden_dtype(h.dtype)

    def load_y(tile, h, *factor):
        element, rows = element_of(h), tile.load_words(h)
        if factor:
            of_rows = zip(rows, tile.load_by_row(*factor), strict=True)
            rows = [[packed_24.times(word, own, element) for word in words] for words, own in of_rows]
        return ([packed_24.squared_relu(word, element) for word in words] for words in rows)

    operands = [h] if factor is None else [h, factor]
    return sparsify_hidden(operands, h.shape[1], load_y, signed=False, name="squared_relu_24")


def sparsify_hidden(
    operands: Sequence[Array], neurons: int, load_y: Callable[..., Iterable[list[Number]]], *, signed: bool, name: str
) -> tuple[Sparse24, HiddenStats]:
    """Selects from Y [T, neurons], of which `load_y` makes the words of a thread's rows.

    It is given the thread's part of the tile and the operands in global memory, h first, which have a row a token.

    `signed` says whether Y may be negative.
    """

    def sparsify_tile(tile, *refs):
        *inputs, values, metadata, stats = refs
        y, element, seen, pairs = load_y(tile, *inputs), element_of(values), Seen.nothing(), []
        for words in y:
            members = [(word, half) for word in words for half in range(2)]
            pairs.append([packed_24.two_of_four(four, signed=signed) for four in groups_of_four(members)])
            magnitudes = [word & _MAGNITUDES for word in words] if signed else words
            seen = seen.add(magnitudes, [pair.values for pair in pairs[-1]], element)
        tile.store_24(values, metadata, pairs)
        store_stats(stats, tile.row * shape_of(metadata)[1] + tile.column, seen)

    h, *by_row = operands
    shape = h.shape[0], neurons
    outs = types_24(*shape, h.dtype)
    tiles = outs[1].shape[:2]  # that the metadata describes
    outs = *outs, stats_type(math.prod(tiles))
    padded = [pad_to_tiles(h), *(pad_to(x, (tiles[0] * TILE, x.shape[1])) for x in by_row)]
    values, metadata, stats = run_by_tile(sparsify_tile, padded, outs, tiles, name=name)
    return Sparse24(values, metadata, shape), HiddenStats(*jnp.sum(stats, axis=(0, 1)))
