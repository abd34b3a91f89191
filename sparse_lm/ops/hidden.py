"""The passes over the hidden layer between the products: activation, selection, compression, and their gradient.

    Y = relu(H)^2, of which the sparse form is kept        forward
    dH = 2 relu(H) dY = 2 sqrt(Y) dY where Y is stored     backward

and with a gate G beside each neuron's own U in H, Y = relu(G)^2 U. `hidden_gradients` is for layers that stay dense.

A backend's kernels take one pass over memory each, as memory is what limits them ("Passes over memory" in
docs/kernels.md).
"""

from __future__ import annotations

from jax import Array
from jaxtyping import Float

from sparse_lm.ops import backends
from sparse_lm.ops.activations import ACTIVATIONS, rows_per_neuron
from sparse_lm.ops.checks import (
    check_array,
    check_block,
    check_format,
    check_group,
    check_ids,
    check_matrix,
    random_key,
)
from sparse_lm.ops.formats import HiddenGradients, HiddenStats, Sparse24, SparseVenom


def squared_relu_24(
    h: Float[Array, "T F"], *, factor: Float[Array, "T 1"] | None = None, implementation: str | None = None
) -> tuple[Float[Sparse24, "T F"], HiddenStats]:
    """Keeps the two largest of each four of Y = relu(h)^2 (2109.08668, 2503.16672).

    Args:
      factor: what to multiply the rows of h by first, in its dtype.

    Returns:
      Y [T, F], 2:4 along F, in the dtype of h: squared in float32, rounded once; and what selection saw.
    """
    check_matrix("h", h)
    _check_factor("h", h, factor)
    return backends.dispatch("squared_relu_24", implementation, h, factor=factor)


def squared_relu_venom(
    h: Float[Array, "T F"], v: int = 128, m: int = 16, *, implementation: str | None = None
) -> tuple[Float[SparseVenom, "T F"], HiddenStats]:
    """Computes relu(h)^2 in V:2:M form, `sparsify_venom` of the Y of `squared_relu_24`, and what selection saw."""
    check_matrix("h", h)
    check_block(v)
    check_group(m, h.shape[1])
    return backends.dispatch("squared_relu_venom", implementation, h, v, m)


def squared_relu_gradients(
    dy: Float[Array, "T S"],
    y: Float[Sparse24, "T S"] | Float[SparseVenom, "T F"],
    *,
    key: Array | None = None,
    factor: Float[Array, "T 1"] | None = None,
    implementation: str | None = None,
) -> HiddenGradients:
    """Computes dH = 2 sqrt(Y) dY where Y is stored, and the transposes of dH and Y that the weight gradients read.

    Args:
      dy: gradient of Y: [T, F] for a 2:4 Y, condensed [T, Kc] for a Venom one.
      y: [T, F], not negative. Of a Venom one whose `contiguous` is 1, every block must list four columns of each
        group of m, in the order of the groups. That is not checked: with others kernels write where they must not.
      key: PRNG key, which makes the transposes stochastic (MVUE).
      factor: what to multiply the rows of dy by first, in its dtype.

    Returns:
      dH [T, F] like y, in the dtype of dy, rounded once; the transposes of dH and of Y as stored, [F, T],
      of each four tokens the two of largest magnitude. With a key, these are `sparsify_24(., "mvue", 0, key=key)`
      of the two: both use the same random numbers, which leaves each unbiased, and no product reads both. Last, f32[T],
      each token's sum of Y dY over what is stored, of dY times `factor`. Over a gate of the token it is that gate's
      gradient.
    """
    check_format("y", y, Sparse24, SparseVenom)
    check_matrix("dy", dy)
    if isinstance(y, SparseVenom):
        check_ids("y.columns", y.columns)
    kept = y.shape[1] if isinstance(y, Sparse24) else 4 * y.shape[1] // y.m
    if dy.shape != (y.shape[0], kept):
        raise ValueError(f"dy {list(dy.shape)} must be {[y.shape[0], kept]} for y {list(y.shape)}")
    _check_factor("dy", dy, factor)
    return backends.dispatch("squared_relu_gradients", implementation, dy, y, key=random_key(key), factor=factor)


def gated_squared_relu_24(
    h: Float[Array, "T rows"], *, implementation: str | None = None
) -> tuple[Float[Sparse24, "T F"], HiddenStats]:
    """Keeps the two largest of each four of Y = relu(g)^2 u; h has a neuron's gate g and its own u side by side.

    Returns:
      Y [T, F], 2:4 along F, in the dtype of h: computed in float32, rounded once; and what selection saw.
    """
    _check_gated(h)
    return backends.dispatch("gated_squared_relu_24", implementation, h)


def gated_squared_relu_gradients(
    dy: Float[Array, "T F"],
    h: Float[Array, "T rows"],
    y: Float[Sparse24, "T F"],
    *,
    key: Array,
    implementation: str | None = None,
) -> HiddenGradients:
    """Computes dH where Y is stored, and the transposes of dH and Y, 2:4 along tokens, that weight gradients read.

    Args:
      dy: gradient of Y; F is a multiple of 4.
      h, y: what `gated_squared_relu_24` took and gave.
      key: PRNG key of the transposes, which are stochastic (MVUE).

    Returns:
      dH [T, 2 F], all gates and then all others, 2:4 along F where y is, in the dtype of dy, rounded once; the
      transposes [2 F, T] of dH, a neuron's two rows side by side, and [F, T] of Y: `sparsify_24(., "mvue", 0, key=key)`
      of each; and f32[T], each token's sum of Y dY over what is stored.
    """
    check_format("y", y, Sparse24)
    _check_gated(h)
    check_matrix("dy", dy)
    if not dy.shape == y.shape == (h.shape[0], h.shape[1] // 2):
        raise ValueError(f"dy {list(dy.shape)} and y {list(y.shape)} must be [T, F] for h {list(h.shape)}, [T, 2 F]")
    if y.shape[1] % 4:
        raise ValueError(f"y {list(y.shape)} must have a multiple of 4 neurons: a group of dH is of gates or of others")
    key = random_key(key, optional=False)
    return backends.dispatch("gated_squared_relu_gradients", implementation, dy, h, y, key=key)


def hidden_gradients(
    dy: Float[Array, "T F"],
    saved: Float[Array, "T rows"],
    activation: str,
    *,
    key: Array,
    implementation: str | None = None,
) -> tuple[Float[Array, "T rows"], Float[Sparse24, "rows T"], Float[Array, "T F"]]:
    """Computes what a dense hidden layer's backward pass reads, and its transpose 2:4 along tokens (2203.10991).

    Args:
      saved: what `activations.activate` said that the backward pass needs: Y, or with a gate H.
      key: PRNG key of the transpose, which is stochastic (MVUE).

    Returns:
      dH in the dtype of dy; dH^T, `sparsify_24(dh, "mvue", 0, key=key)`; and Y. dH and Y are rounded once.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation = {activation!r} must be one of {', '.join(ACTIVATIONS)}")
    check_matrix("dy", dy)
    check_matrix("saved", saved)
    if saved.shape != (dy.shape[0], rows_per_neuron(activation) * dy.shape[1]):
        raise ValueError(f"saved {list(saved.shape)} must have {rows_per_neuron(activation)} for each of dy's columns")
    key = random_key(key, optional=False)
    return backends.dispatch("hidden_gradients", implementation, dy, saved, activation, key=key)


def _check_factor(name: str, x: Array, factor: Array | None) -> None:
    if factor is None:
        return
    check_array("factor", factor)
    if (factor.shape, factor.dtype) != ((x.shape[0], 1), x.dtype):
        raise ValueError(f"factor {factor.dtype}{list(factor.shape)} must be {x.dtype}[{x.shape[0]}, 1], as {name} is")


def _check_gated(h: Array) -> None:
    check_matrix("h", h)
    if h.shape[1] % 2:
        raise ValueError(f"h {list(h.shape)} must have two columns a neuron")
