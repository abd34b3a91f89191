"""The gates of FFNs in NumPy, written from their descriptions; independent of `sparse_lm`."""

import numpy as np


def gate(g: np.ndarray, activation: str) -> tuple[np.ndarray, np.ndarray]:
    """Value and derivative of a gate. SiLU and GELU (by tanh) are g times the logistic function of some z(g)."""
    if activation == "gated_relu2":
        return np.square(np.maximum(g, 0)), 2 * np.maximum(g, 0)
    factor = 2 * np.sqrt(2 / np.pi)
    tanh = factor * (g + 0.044715 * g**3), factor * (1 + 3 * 0.044715 * g**2)
    z, dz = (g, np.ones_like(g)) if activation == "swiglu" else tanh
    share = np.exp(-np.logaddexp(0, -z))
    return g * share, share + g * share * np.exp(-np.logaddexp(0, z)) * dz
