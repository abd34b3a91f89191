"""The FFN of each recipe as masked dense NumPy in float64, written from the papers' formulas.

Independent of `sparse_lm`: masks, scales, centroids, the order of the tokens and the random draws are inputs.
A draw is a function of (a [T, K], number of its use) to an estimate of a that is 2:4 along T.
"""

import dataclasses

import numpy as np

from tests.ops.numpy_gates import gate
from tests.ops.numpy_sparse import soft_threshold, top_two_of_four
from tests.recipes.numpy_routing import nearest


@dataclasses.dataclass
class Inputs:
    """Holds x [T, D], both weights [F, D], the gradient do [T, D] of the output, and an order of the tokens.

    With a gate, w1 is [2 F, D]: a neuron's gate's row, and then its own.
    """

    x: np.ndarray
    w1: np.ndarray
    w2: np.ndarray
    do: np.ndarray
    order: np.ndarray
    activation: str = "squared_relu"


@dataclasses.dataclass
class Result:
    """Holds what an FFN computes: its output, all gradients, and its statistics by name."""

    o: np.ndarray
    dx: np.ndarray
    dw1: np.ndarray
    dw2: np.ndarray
    stats: dict[str, np.ndarray]


def dense(a, *, draw=None, **in_fp8):
    return _ffn(a, a.w1, a.w2, a.w2, a.w1, **in_fp8)


def fst(a, *, masks, draw):
    w1, w2 = a.w1 * masks[0], a.w2 * masks[1]
    return _ffn(a, w1, w2, w2, w1, dh_for_dw1=lambda dh: draw(dh, 1), do_for_dw2=lambda do: draw(do, 2))


def sste(a, *, scales, draw):
    w1 = scales[0] * soft_threshold(a.w1, axis=1)
    w2 = scales[1] * soft_threshold(a.w2, axis=0)  # contracted over neurons in the forward
    return _ffn(a, w1, w2, w2, w1, dh_for_dw1=lambda dh: draw(dh, 1), do_for_dw2=lambda do: draw(do, 2))


def act24(a, *, dense_features, rounded=None, draw=None):
    """Of FP8, `rounded` is what e4m3 leaves of a matrix, with a scale along an axis or one."""
    rounded = rounded or (lambda z, _: z)
    y = np.square(np.maximum(rounded(a.x, 1) @ rounded(a.w1, None).T, 0))
    stored = (y * top_two_of_four(y))[a.order]
    counts = (stored * top_two_of_four(stored, axis=0) != 0).sum(0)
    busy = np.argsort(-counts, kind="stable")[: min(y.shape[1], -(-round(y.shape[1] * dense_features) // 128) * 128)]

    def weight_gradient(z, b):
        along_tokens = z * in_token_order(top_two_of_four(z[a.order], axis=0), a.order)
        product = rounded(along_tokens, 0).T @ rounded(b, 0)
        product[busy] = z[:, busy].T @ b
        return product

    kept = top_two_of_four
    return _ffn(a, a.w1, a.w2, a.w2, a.w1, mask_y=kept, rounded=rounded, weight_gradient=weight_gradient)


def venom(a, *, scales, centroids, v, m, draw):
    w1, w2 = (scale * soft_threshold(w, axis=1) for scale, w in zip(scales, (a.w1, a.w2), strict=True))
    experts = nearest(a.x, centroids)
    slots = a.order[np.argsort(experts[a.order], kind="stable")]
    mask = lambda y: in_token_order(venom_mask(y[slots], v, m), slots)  # noqa: E731
    drawn = lambda z: in_token_order(draw(z[slots], 3), slots)  # noqa: E731
    result = _ffn(a, w1, w2, w2, w1, mask_y=mask, dh_for_dw1=drawn, y_for_dw2=drawn)
    result.stats["expert_load"] = np.bincount(experts, minlength=len(centroids)) / len(experts)
    return result


def slices(a, *, centroids, m, v=1, scales=None, draw=None, parts=1):
    experts, own = slices_of_tokens(a.x, centroids, len(a.w2), parts)
    result = of_experts(a, experts, own, m // 4, v=v, scales=scales, draw=draw)
    result.stats["expert_load"] = np.bincount(experts, minlength=m // 4) / len(a.x)
    return result


dense_slices = slices  # without scales


def of_experts(a, experts, own, count, *, v, scales=None, draw=None):
    """An FFN of which a token computes its expert's neurons: 2:4 of them by 2:4 weights, or all densely without scales.

    Args:
      experts: int[T], of `count`.
      own: int[T, S], the neurons of each token.
      v: slots of a block: an expert's tokens fill whole blocks, in which draws see them.
    """
    w1, w2, slots = a.w1, a.w2, slots_by_expert(experts, a.order, count, v)
    computed = np.zeros((len(a.x), len(w2)))
    np.put_along_axis(computed, own, 1, axis=1)
    if scales is None:
        return _ffn(a, w1, w2, w2, w1, mask_y=lambda _: computed, computed=computed)
    w1, w2 = (scale * soft_threshold(w, axis=1) for scale, w in zip(scales, (w1, w2), strict=True))

    def mask(y):
        mask = np.zeros_like(y)
        np.put_along_axis(mask, own, top_two_of_four(np.take_along_axis(y, own, axis=1)), axis=1)
        return mask

    def drawn(z):
        by_neuron = z.reshape(len(z), len(w2), -1)
        condensed = np.take_along_axis(by_neuron, own[..., None], axis=1)
        of_slices = condensed.reshape(len(z), -1)
        in_slots = draw(np.where(slots[:, None] >= 0, of_slices[slots], 0), 3)
        of_slices[slots[slots >= 0]] = in_slots[slots >= 0]
        estimate = np.zeros_like(by_neuron)
        np.put_along_axis(estimate, own[..., None], of_slices.reshape(condensed.shape), axis=1)
        return estimate.reshape(z.shape)

    return _ffn(a, w1, w2, w2, w1, mask_y=mask, dh_for_dw1=drawn, y_for_dw2=drawn, computed=computed)


def mixture(a, *, gates, chosen, experts, **options):
    """The result of a mixture's experts, and the gradient of its gates: each pair of a token and an expert is a token.

    Args:
      a: w1 and w2 are [E Fe, D], expert after expert.
      gates, chosen: [T, k].
      options: of `of_experts`.
    """
    (tokens, choices), neurons = chosen.shape, len(a.w2) // experts
    x, do = (np.repeat(z, choices, axis=0) for z in (a.x, a.do))
    order = (a.order[:, None] * choices + np.arange(choices)).ravel()
    pairs = dataclasses.replace(a, x=x, do=gates.reshape(-1, 1) * do, order=order)
    own = chosen.reshape(-1, 1) * neurons + np.arange(neurons)
    result = of_experts(pairs, chosen.ravel(), own, experts, **options)
    o, dx = (z.reshape(tokens, choices, -1) for z in (result.o, result.dx))
    dgates = np.einsum("td,tkd->tk", a.do, o)
    return dataclasses.replace(result, o=(gates[..., None] * o).sum(1), dx=dx.sum(1)), dgates


def slices_of_tokens(x, centroids, neurons, parts):
    """The expert of each token, and its neurons [T, S]."""
    experts, count = nearest(x, centroids), len(centroids)
    of_expert = np.arange(neurons).reshape(parts, count, -1).swapaxes(0, 1).reshape(count, -1)
    return experts, of_expert[experts]


def slots_by_expert(experts, order, count, v):
    """Returns the token of each slot, -1 where padded: tokens of each of `count` experts fill whole blocks of v.

    Args:
      experts: int[T], the expert of each token.
      order: int[T], in which an expert takes its tokens.
    """
    slots, first = np.full((len(experts) + count * (v - 1)) // v * v, -1), 0
    for expert in range(count):
        members = order[experts[order] == expert]
        slots[first : first + len(members)] = members
        first += -(-len(members) // v) * v
    return slots


def in_token_order(rows, slots):
    """The inverse of `rows = z[slots]`."""
    z = np.empty_like(rows)
    z[slots] = rows
    return z


def venom_mask(y, v, m):
    """V:2:M mask of y [T, F]: of m columns the 4 of largest norm over v rows, then 2 of those 4 per row."""
    mask = np.zeros_like(y)
    for block in range(0, y.shape[0], v):
        for group in range(0, y.shape[1], m):
            tile = y[block : block + v, group : group + m]
            columns = np.sort(np.argsort(-np.square(tile).sum(0), kind="stable")[:4])
            mask[block : block + v, group + columns] = top_two_of_four(tile[:, columns])
    return mask


def _ffn(a, w1_up, w2_down, w2_back, w1_back, *, mask_y=None, dh_for_dw1=None, y_for_dw2=None, do_for_dw2=None,
         computed=1.0, rounded=lambda z, _: z, weight_gradient=lambda a, b: a.T @ b):  # fmt: skip
    """Outputs and gradients with every mask already in its operand, or given as a function of it.

    Args:
      a: inputs.
      w1_up, w2_down, w2_back, w1_back: [F, D], the weights that H, O, dY and dX read.
      mask_y: Y -> 0/1 mask of Y and dH.
      dh_for_dw1: dH -> the dH that dW1 reads.
      y_for_dw2: Y -> the Y that dW2 reads.
      do_for_dw2: dO -> the dO that dW2 reads.
      computed: 0/1 [T, F], the neurons of each token.
      rounded: what activations, by rows (1), and weights, as a whole (None), become before they are multiplied.
      weight_gradient: the product of dH and X, and of Y and dO.
    """
    same = lambda z: z  # noqa: E731
    all_of_y, of_h = activate(rounded(a.x, 1) @ rounded(w1_up, None).T, a.activation)
    all_of_y = all_of_y * computed
    mask = (mask_y or np.ones_like)(all_of_y)
    y = all_of_y * mask
    dh = of_h(rounded(a.do, 1) @ rounded(w2_back, None).T * mask * computed)
    return Result(
        o=rounded(y, 1) @ rounded(w2_down, None),
        dx=rounded(dh, 1) @ rounded(w1_back, None),
        dw1=weight_gradient((dh_for_dw1 or same)(dh), a.x),
        dw2=weight_gradient((y_for_dw2 or same)(y), (do_for_dw2 or same)(a.do)),
        stats={
            "activation_sparsity": 1 - np.count_nonzero(all_of_y) / np.sum(computed * np.ones_like(y)),
            "kept_energy": np.square(y).sum() / np.square(all_of_y).sum(),
        },
    )


def activate(h, activation):
    """Y of the rows' products h, and a function of dY to dH."""
    if activation == "squared_relu":
        return np.square(np.maximum(h, 0)), lambda dy: dy * 2 * np.maximum(h, 0)
    up = h[..., 1::2]  # rows of gate and up by turns
    value, slope = gate(h[..., ::2], activation)
    return value * up, lambda dy: np.stack([dy * up * slope, dy * value], axis=-1).reshape(h.shape)
