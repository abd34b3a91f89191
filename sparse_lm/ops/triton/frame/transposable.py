"""Masks of 4 x 4 tiles in the registers of a thread: `sparse_lm.ops.transposable`, without 90 sums for every tile.

How often the upper two rows of a pattern keep each column says how often the lower two must. Lower halves that keep
each column equally often go with the same upper halves, and the best of them is the best with each: so one pattern is
left for each of the 36 upper halves.

Numerics: the reference's choice where sums of magnitudes are exact in float32, or of inf, NaN and small numbers; where
two patterns keep nearly the same, it may differ.
"""

from __future__ import annotations

import itertools

import numpy as np
import triton
import triton.language as tl

from sparse_lm.ops.select import LARGEST

_PAIRS = tuple(itertools.combinations(range(4), 2))
_HALVES = tuple(itertools.product(_PAIRS, repeat=2))  # of patterns, in the order of `TRANSPOSABLE_PATTERNS`
_COUNTS = [tuple(np.bincount(upper + lower, minlength=4)) for upper, lower in _HALVES]  # of what is kept, by column
_CLASSES = list(dict.fromkeys(_COUNTS))

_PAIR_COUNT, _HALF_COUNT = tl.constexpr(len(_PAIRS)), tl.constexpr(len(_HALVES))
_CLASS_COUNT = tl.constexpr(len(_CLASSES))
_BITS = tl.constexpr(  # of halves, one for each entry, row by row
    tuple(sum(1 << 4 * row + column for row, pair in enumerate(half) for column in pair) for half in _HALVES)
)
_FIRST_OF = tl.constexpr(tuple(_COUNTS.index(counts) for counts in _CLASSES))
_CLASS_OF = tl.constexpr(tuple(_CLASSES.index(counts) for counts in _COUNTS))
_COMPLEMENT = tl.constexpr(  # the class whose halves make a pattern with a half
    tuple(_CLASSES.index(tuple(2 - count for count in counts)) for counts in _COUNTS)
)
_LARGEST = tl.constexpr(LARGEST)


@triton.jit
def best_mask(rows):
    """Finds the mask that keeps the largest sum of magnitudes; of equal sums the lowest pattern.

    Args:
      rows: four times four float32 arrays, an entry of every tile each.

    Returns:
      int32 of the shape of one of them: 16 bits for each tile, row by row.
    """
    first, second = _finite_magnitudes(rows[0]), _finite_magnitudes(rows[1])
    third, fourth = _finite_magnitudes(rows[2]), _finite_magnitudes(rows[3])
    # Added to every sum: with it lower halves round, and tie, as the best patterns do, whose sums are no less than it.
    largest = tl.maximum(tl.maximum(_max(first), _max(second)), tl.maximum(_max(third), _max(fourth)))
    first, second = _pair_sums(first, 0.0), _pair_sums(second, 0.0)
    third, fourth = _pair_sums(third, largest), _pair_sums(fourth, 0.0)
    lower_sums, lower_bits = (), ()
    for number in tl.static_range(_CLASS_COUNT):
        lower_sum, bits = _best_lower_half(third, fourth, number)
        lower_sums += (lower_sum,)
        lower_bits += (bits,)
    most, best = -1.0, 0
    for upper in tl.static_range(_HALF_COUNT):
        kept = first[upper // _PAIR_COUNT] + second[upper % _PAIR_COUNT] + lower_sums[_COMPLEMENT[upper]]
        best = tl.where(kept > most, _BITS[upper] | lower_bits[_COMPLEMENT[upper]] << 8, best)
        most = tl.maximum(kept, most)
    return best


@triton.jit
def _best_lower_half(third, fourth, CLASS: tl.constexpr):
    """Finds the largest sum that a half of a class keeps, of the sums of the two rows' pairs, and its bits."""
    FIRST: tl.constexpr = _FIRST_OF[CLASS]
    most, best = third[FIRST // _PAIR_COUNT] + fourth[FIRST % _PAIR_COUNT], _BITS[FIRST]
    for half in tl.static_range(FIRST + 1, _HALF_COUNT):
        if _CLASS_OF[half] == CLASS:
            kept = third[half // _PAIR_COUNT] + fourth[half % _PAIR_COUNT]
            best = tl.where(kept > most, _BITS[half], best)
            most = tl.maximum(kept, most)
    return most, best


@triton.jit
def _pair_sums(row, addend):
    """Computes the sums of a row's pairs, in the order of `_PAIRS`."""
    a, b, c, d = row
    return a + b + addend, a + c + addend, a + d + addend, b + c + addend, b + d + addend, c + d + addend


@triton.jit
def _max(row):
    return tl.maximum(tl.maximum(row[0], row[1]), tl.maximum(row[2], row[3]))


@triton.jit
def _finite_magnitudes(row):
    """Computes `select.finite_magnitude` of four float32."""
    a, b, c, d = row
    return _finite_magnitude(a), _finite_magnitude(b), _finite_magnitude(c), _finite_magnitude(d)


@triton.jit
def _finite_magnitude(x):
    magnitude = tl.abs(x)
    return tl.where(magnitude < _LARGEST, magnitude, _LARGEST)
