"""Gates and their gradients, which stand side by side, in each dtype against formulas in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import activations
from tests.ops.operands import exact_hidden


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("activation", activations.GATES)
def test_gates_and_their_gradients(activation, dtype):
    rng = np.random.default_rng(0)
    h, dy = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((16, 24), (16, 12)))
    y, _, saved = activations.activate(h, activation)
    found = activations.gradient(dy, saved, activation), y
    for array, expected in zip(found, exact_hidden(dy, h, activation), strict=True):
        assert array.dtype == dtype
        error = np.abs(np.asarray(array, np.float64) - expected).max() / np.abs(expected).max()
        assert error < 8 * jnp.finfo(dtype).eps
