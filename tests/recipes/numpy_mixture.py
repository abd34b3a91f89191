"""A mixture's experts in NumPy, float64, pair by pair, written from the formulas; independent of `sparse_lm`.

Gates, choices, scales and random draws are inputs, as in masked_dense_ffn.py.
"""

import numpy as np

from tests.ops.numpy_sparse import soft_threshold, top_two_of_four
from tests.recipes.masked_dense_ffn import Result, slots_by_expert


def mixture(x, w1, w2, gates, chosen, do, *, order=None, scales=None, draw=None, v=1):
    """Returns the result of all pairs, and the gradient of the gates.

    Args:
      x, do: [T, D].
      w1, w2: [E, Fe, D].
      gates: [T, k].
      chosen: int[T, k].
      order: int[T], in which an expert takes its tokens.
      scales: of the soft threshold of both weights; None for dense experts.
      draw: a function of a [Tp, Fe] and a number, the stochastic estimate of a; None for a itself.
      v: slots of a block: an expert's pairs fill whole blocks.
    """
    experts, choices = len(w1), chosen.shape[1]
    keep = np.ones_like if scales is None else top_two_of_four
    if scales is not None:
        w1, w2 = (
            scale * soft_threshold(w.reshape(-1, w.shape[2]), axis=1).reshape(w.shape)
            for scale, w in zip(scales, (w1, w2), strict=True)
        )
    tokens, owners = slots_by_expert(chosen, np.arange(len(x)) if order is None else order, experts, v)
    real = tokens >= 0
    slot_gates, choice = np.zeros(len(tokens)), np.zeros(len(tokens), int)
    for slot in np.flatnonzero(real):
        (choice[slot],) = np.flatnonzero(chosen[tokens[slot]] == owners[slot])
        slot_gates[slot] = gates[tokens[slot], choice[slot]]
    x_slots, do_slots = (np.where(real[:, None], a[tokens], 0) for a in (x, do))

    h = np.einsum("sd,sfd->sf", x_slots, w1[owners])
    all_of_y = np.square(np.maximum(h, 0))
    mask = keep(all_of_y)
    y = all_of_y * mask
    o_slots = np.einsum("sf,sfd->sd", y, w2[owners])
    do_of_experts = slot_gates[:, None] * do_slots
    dh = np.einsum("sd,sfd->sf", do_of_experts, w2[owners]) * 2 * np.maximum(h, 0) * mask
    dx_slots = np.einsum("sf,sfd->sd", dh, w1[owners])
    drawn_dh, drawn_y = (draw(a, 3) if draw else a for a in (dh, y))

    o, dx, dgates = np.zeros_like(x), np.zeros_like(x), np.zeros_like(gates)
    dw1, dw2 = np.zeros_like(w1), np.zeros_like(w2)
    for slot in np.flatnonzero(real):
        token, expert = tokens[slot], owners[slot]
        o[token] += slot_gates[slot] * o_slots[slot]
        dx[token] += dx_slots[slot]
        dgates[token, choice[slot]] = do[token] @ o_slots[slot]
        dw1[expert] += np.outer(drawn_dh[slot], x_slots[slot])
        dw2[expert] += np.outer(drawn_y[slot], do_of_experts[slot])
    stats = {
        "activation_sparsity": 1 - np.count_nonzero(all_of_y) / (len(x) * choices * w1.shape[1]),
        "kept_energy": np.square(y).sum() / np.square(all_of_y).sum(),
    }
    shape = -1, x.shape[1]
    return Result(o, dx, dw1.reshape(shape), dw2.reshape(shape), stats), dgates
