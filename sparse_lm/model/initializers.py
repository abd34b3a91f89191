"""Initial weights.

Every matrix is drawn from a normal truncated at two standard deviations and rescaled to standard deviation
1/sqrt(fan-in), so that unit-variance inputs give unit-variance outputs. The two matrices of a layer that write to the
residual stream (attention's and the FFN's output projections) are further divided by sqrt(2 * layers): 2 * layers
independent terms of that size add up to unit variance (GPT-2's rule). Norm scales start at one.
"""

from __future__ import annotations

from jax import Array
from jax.nn.initializers import variance_scaling

_of_inputs = variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=-1, out_axis=-2)


def matrix(key: Array, outputs: int, inputs: int) -> Array:
    """Draws f32[outputs, inputs] with a standard deviation of 1/sqrt(inputs)."""
    return _of_inputs(key, (outputs, inputs))


def residual_matrix(key: Array, outputs: int, inputs: int, layers: int) -> Array:
    """Draws f32[outputs, inputs] with a standard deviation of 1/sqrt(inputs * 2 * layers)."""
    return matrix(key, outputs, inputs) * (2 * layers) ** -0.5
