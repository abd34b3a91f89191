"""The sparse operations in plain loops over numpy arrays, written from their descriptions."""

import math

import numpy as np


def magnitude_order(group) -> list[int]:
    """Positions from largest to smallest magnitude: NaN first, ties by position."""

    def sort_key(position):
        value = abs(float(group[position]))
        return (0, 0.0, position) if math.isnan(value) else (1, -value, position)

    return sorted(range(len(group)), key=sort_key)


def soft_threshold_group(group) -> list[float]:
    """S of four values; `threshold` is the second smallest in magnitude order."""
    order = magnitude_order(group)
    threshold = abs(float(group[order[2]]))
    survivors = [0.0] * 4
    for position in order[:2]:
        value = float(group[position])
        if math.isnan(value):
            survivors[position] = value
        elif abs(value) > threshold:
            survivors[position] = math.copysign(abs(value) - threshold, value)
    return survivors


def sparsify_rows(x: np.ndarray, method: str) -> tuple[np.ndarray, np.ndarray]:
    """(dense float64 result, positions kept) of 2:4 along the rows of x, whose width is a multiple of 4."""
    dense = np.zeros(x.shape)
    mask = np.zeros(x.shape, bool)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], 4):
            group = x[row, start : start + 4]
            kept = magnitude_order(group)[:2]
            result = group if method == "magnitude" else soft_threshold_group(group)
            for position in kept:
                dense[row, start + position] = result[position]
                mask[row, start + position] = True
    return dense, mask


def compress(dense: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values [M, K / 2] and metadata [M / 64, K / 64, 128] uint32 of whole tiles, two kept per group.

    Each lane of a warpgroup holds one word: lane 32 w + 4 g + t has, in its low half, row 16 w + g, in
    its high half row 16 w + g + 8, of logical columns 16 t to 16 t + 15: four bits a group, index of
    the first kept | index of the second << 2, the first group lowest.
    """
    rows, columns = dense.shape
    values = dense[mask].reshape(rows, columns // 2)
    metadata = np.zeros((rows // 64, columns // 64, 128), np.uint32)
    for row_tile in range(rows // 64):
        for column_tile in range(columns // 64):
            for lane in range(128):
                warp, g, t = lane // 32, lane % 32 // 4, lane % 4
                word = 0
                for half in range(2):
                    row = 64 * row_tile + 16 * warp + g + 8 * half
                    for group in range(4):
                        start = 64 * column_tile + 16 * t + 4 * group
                        first, second = np.flatnonzero(mask[row, start : start + 4])
                        word |= int(first | second << 2) << (16 * half + 4 * group)
                metadata[row_tile, column_tile, lane] = word
    return values, metadata


def pad(x: np.ndarray, row_multiple: int = 64, column_multiple: int = 64) -> np.ndarray:
    return np.pad(x, ((0, -x.shape[0] % row_multiple), (0, -x.shape[1] % column_multiple)))
