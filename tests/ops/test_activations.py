"""Gates and their gradients, which stand side by side, in each dtype against formulas in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import activations


def swiglu(g):
    sigmoid = 1 / (1 + np.exp(-g))
    return g * sigmoid, sigmoid * (1 + g * (1 - sigmoid))


def geglu(g):
    tanh = np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))
    inner = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * g**2)
    return g * (1 + tanh) / 2, (1 + tanh) / 2 + g * (1 - tanh**2) * inner / 2


def gated_relu2(g):
    positive = np.maximum(g, 0)
    return positive**2, 2 * positive


FORMULAS = {of.__name__: of for of in (swiglu, geglu, gated_relu2)}  # of the gate: its function, and the derivative


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("activation", activations.GATES)
def test_gates_and_their_gradients(activation, dtype):
    rng = np.random.default_rng()
    h, dy = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((16, 24), (16, 12)))
    g, u = np.asarray(h, np.float64).reshape(16, 12, 2).transpose(2, 0, 1)
    of_gate, slope = FORMULAS[activation](g)
    do = np.asarray(dy, np.float64)

    y, _, saved = activations.activate(h, activation)
    dh = activations.gradient(dy, saved, activation)

    expected_dh = np.stack([do * u * slope, do * of_gate], axis=-1).reshape(16, 24)
    for found, expected in ((y, of_gate * u), (dh, expected_dh)):
        assert found.dtype == dtype
        error = np.abs(np.asarray(found, np.float64) - expected).max() / np.abs(expected).max()
        assert error < 8 * jnp.finfo(dtype).eps
