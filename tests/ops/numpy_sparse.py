"""The sparse operations in NumPy, written from their descriptions; independent of `sparse_lm`."""

import numpy as np


def magnitude_order(groups: np.ndarray) -> np.ndarray:
    """Positions along the last axis from largest to smallest magnitude: NaN first, ties by position."""
    return np.lexsort((-np.abs(groups), ~np.isnan(groups)), axis=-1)


def _by_four(function, x: np.ndarray, axis: int) -> np.ndarray:
    """Applies a function to the groups of four along an axis, of which the last is filled up with zeros."""
    x = np.moveaxis(x, axis, -1)
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 4)])
    result = function(padded.reshape(*x.shape[:-1], -1, 4)).reshape(padded.shape)
    return np.moveaxis(result[..., : x.shape[-1]], -1, axis)


def top_two_of_four(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """0/1 mask of the two largest |x| of each four along `axis`; of equals the first."""
    return _by_four(lambda groups: (magnitude_order(groups).argsort(-1) < 2).astype(np.float64), x, axis)


def soft_threshold(w: np.ndarray, axis: int) -> np.ndarray:
    """sign(w) max(|w| - t, 0) with t the second smallest |w| of each four along `axis`; a NaN that is kept stays."""

    def of_groups(groups):
        size, threshold = np.abs(groups), np.abs(np.take_along_axis(groups, magnitude_order(groups)[..., 2:3], -1))
        return np.where(size > threshold, np.copysign(size - threshold, groups), 0)

    return np.where(np.isnan(w) & (top_two_of_four(w, axis) > 0), w, _by_four(of_groups, w, axis))


def sparsify_rows(x: np.ndarray, method: str) -> tuple[np.ndarray, np.ndarray]:
    """(dense float64 result, positions kept) of 2:4 along the rows of x."""
    x = np.asarray(x, np.float64)
    mask = top_two_of_four(x) > 0
    return np.where(mask, x, 0) if method == "magnitude" else soft_threshold(x, -1), mask


def compress(dense: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values [M, K / 2] and metadata [M / 64, K / 64, 128] uint32 of whole tiles, two kept per group.

    Each lane of a warpgroup holds one word: lane 32 w + 4 g + t has, in its low half, row 16 w + g, in
    its high half row 16 w + g + 8, of logical columns 16 t to 16 t + 15: four bits a group, index of
    the first kept | index of the second << 2, the first group lowest.
    """
    rows, columns = dense.shape
    kept = np.nonzero(mask)[1].reshape(rows, columns // 4, 2) % 4
    bits = kept[..., 0] | kept[..., 1] << 2
    bits = bits.reshape(-1, 4, 2, 8, columns // 64, 4, 4)  # tile, w, half, g, tile, t, group
    words = bits << (16 * np.arange(2)[:, None, None, None, None] + 4 * np.arange(4))
    metadata = words.sum((2, 6)).transpose(0, 3, 1, 2, 4).reshape(rows // 64, columns // 64, 128)
    return dense[mask].reshape(rows, columns // 2), metadata.astype(np.uint32)


def pad(x: np.ndarray) -> np.ndarray:
    """Fills up tiles of 64 x 64 with zeros."""
    return np.pad(x, [(0, -size % 64) for size in x.shape])
