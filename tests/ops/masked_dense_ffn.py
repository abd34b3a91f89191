"""The squared-ReLU FFN of each recipe as masked dense NumPy in float64, written from the papers' formulas.

Independent of `sparse_lm.ops`: it knows only which rows are where, which masks are stored, and the
random draws, which are inputs here.
"""

import dataclasses

import numpy as np


def top_two_of_four(x, axis=-1):
    """0/1 mask of the two largest |x| of each four along `axis`; of equals the first."""
    x = np.moveaxis(np.abs(x), axis, -1)
    pad = -x.shape[-1] % 4
    groups = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)], constant_values=-1.0)
    groups = groups.reshape(*x.shape[:-1], -1, 4)
    rank = np.argsort(np.argsort(-groups, axis=-1, kind="stable"), axis=-1, kind="stable")
    mask = (rank < 2).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
    return np.moveaxis(mask, -1, axis).astype(np.float64)


def soft_threshold(w, axis):
    """sign(w) max(|w| - t, 0) with t the second smallest |w| of each four along `axis`."""
    w = np.moveaxis(w, axis, -1)
    groups = w.reshape(*w.shape[:-1], -1, 4)
    t = np.sort(np.abs(groups), axis=-1)[..., 1:2]
    s = np.sign(groups) * np.maximum(np.abs(groups) - t, 0)
    return np.moveaxis(s.reshape(w.shape), -1, axis)


def venom_mask(y, v, m):
    """V:2:M mask of y [T, F]: of m columns the 4 of largest norm over v rows, then 2 of those 4 per row."""
    mask = np.zeros_like(y)
    for block in range(0, y.shape[0], v):
        for group in range(0, y.shape[1], m):
            tile = y[block : block + v, group : group + m]
            columns = np.sort(np.argsort(-np.square(tile).sum(0), kind="stable")[:4])
            mask[block : block + v, group + columns] = top_two_of_four(tile[:, columns])
    return mask


def listed_mask(y, columns, v):
    """Mask of y [T, F] that keeps 2 of each 4 consecutive listed columns; columns [T / v, Fc]."""
    mask = np.zeros_like(y)
    for block, listed in enumerate(columns):
        rows = slice(block * v, (block + 1) * v)
        mask[rows, listed] = top_two_of_four(y[rows][:, listed])
    return mask


@dataclasses.dataclass
class Result:
    o: np.ndarray
    dx: np.ndarray
    dw1: np.ndarray
    dw2: np.ndarray


def ffn(
    x, w1_up, w2_down, w2_back, w1_back, do, *, mask_y=np.ones_like, dh_for_dw1=None, y_for_dw2=None, dw2_from=None
):
    """Outputs and gradients with every mask already in its operand, or given as a function of it.

    Args:
      x: [T, D].
      w1_up, w2_down, w2_back, w1_back: [F, D], the weights that H, O, dY and dX read.
      do: [T, D], gradient of the output.
      mask_y: Y -> 0/1 mask of Y and dH.
      dh_for_dw1: dH -> the dH that dW1 reads.
      y_for_dw2: Y -> the Y that dW2 reads.
      dw2_from: dO -> the dO that dW2 reads.
    """
    same = lambda a: a  # noqa: E731
    h = x @ w1_up.T
    y = np.square(np.maximum(h, 0))
    mask = mask_y(y)
    y = y * mask
    dh = do @ w2_back.T * 2 * np.maximum(h, 0) * mask
    return Result(
        o=y @ w2_down,
        dx=dh @ w1_back,
        dw1=(dh_for_dw1 or same)(dh).T @ x,
        dw2=(y_for_dw2 or same)(y).T @ (dw2_from or same)(do),
    )


def top_two_along_tokens(share_dense=0.0, counts=None):
    """a [T, F] -> a with 2 of 4 along T, but for the `share_dense` columns of largest `counts`, rounded up to 128."""

    def select(a):
        mask = top_two_of_four(a, axis=0)
        if share_dense:
            n = min(a.shape[1], -(-round(a.shape[1] * share_dense) // 128) * 128)
            mask[:, np.argsort(-counts, kind="stable")[:n]] = 1
        return a * mask

    return select
