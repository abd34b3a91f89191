"""An unbiased 2:4 estimate of minimum variance (MVUE, 2203.10991), for gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from sparse_lm.ops.select import Members

FLOOR = 1e-6  # of a group's largest magnitude: no member has probability zero


def sample_two(members: Members, key: Array) -> tuple[Array, Array, list[Array]]:
    """Draws two members of each group, one after the other, each in proportion to its magnitude.

    Dividing a member by the probability that it is drawn makes the estimate exactly unbiased. This
    is the approximate form: its variance on Gaussians is 0.50 of the signal, against about 0.47 for
    the exact one.

    Args:
      members: four float32 arrays of equal shape, the members of each group.
      key: PRNG key.

    Returns:
      (first, second, estimates): ascending positions, uint32, and all four members divided by their
      probabilities; the caller keeps those at the two positions.
    """
    peak = functools.reduce(jnp.maximum, [jnp.abs(x) for x in members])  # XLA's max over an axis may lose NaN
    drawable = (peak > 0) & jnp.isfinite(peak)
    weights = [jnp.where(drawable, jnp.abs(x) / peak, 0.0) + FLOOR for x in members]
    bits = jax.random.bits(key, peak.shape)  # sixteen for each draw
    uniform = [jnp.where(drawable, _uniform(half), 0.0) for half in (bits & 0xFFFF, bits >> 16)]  # zero draws (0, 1)

    one = _draw(weights, uniform[0])
    two = _draw([jnp.where(one == position, 0.0, w) for position, w in enumerate(weights)], uniform[1])

    probabilities = _inclusion_probabilities(weights)
    estimates = [jnp.where(jnp.isfinite(peak), x / p, jnp.nan) for x, p in zip(members, probabilities, strict=True)]
    return jnp.minimum(one, two), jnp.maximum(one, two), estimates


def _uniform(half: Array) -> Array:
    """uint32 below 2^16 to a number between 0 and 1, neither of them reached."""
    return (half.astype(jnp.float32) + 0.5) / 2**16


def _draw(weights: Members, uniform: Array) -> Array:
    """A position, drawn in proportion to the weights; never one of weight zero."""
    edges = [weights[0]]
    for weight in weights[1:]:
        edges.append(edges[-1] + weight)
    target = uniform * edges[3]
    return sum((target >= edge).astype(jnp.uint32) for edge in edges[:3])


def _inclusion_probabilities(weights: Members) -> list[Array]:
    """Probability that each member is one of two drawn without replacement."""
    total = sum(weights)
    others = [sum(w for j, w in enumerate(weights) if j != i) for i in range(4)]  # no cancellation
    ratio = [w / rest for w, rest in zip(weights, others, strict=True)]
    return [w / total * (1 + sum(r for j, r in enumerate(ratio) if j != i)) for i, w in enumerate(weights)]
