"""Initial weights.

Every matrix is drawn from a normal truncated at two standard deviations and rescaled to standard
deviation 1/sqrt(fan-in), so that unit-variance inputs give unit-variance outputs. The two matrices
of a layer that write to the residual stream (attention's and the FFN's output projections) are
further divided by sqrt(2 * layers): 2 * layers independent terms of that size add up to unit
variance (GPT-2's rule). Norm scales start at one.
"""

from __future__ import annotations

import functools

from jax import Array
from jax.nn.initializers import variance_scaling

_truncated_normal = functools.partial(variance_scaling, mode="fan_in", distribution="truncated_normal")


def matrix(key: Array, outputs: int, inputs: int) -> Array:
    """Draws f32[outputs, inputs] with a standard deviation of 1/sqrt(inputs)."""
    return _truncated_normal(1.0, in_axis=-1, out_axis=-2)(key, (outputs, inputs))


def residual_matrix(key: Array, outputs: int, inputs: int, layers: int) -> Array:
    """Draws f32[outputs, inputs] with a standard deviation of 1/sqrt(inputs * 2 * layers)."""
    return matrix(key, outputs, inputs) * (2 * layers) ** -0.5
