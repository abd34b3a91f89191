"""Of `sampled_squared_relu_24`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lm.ops import reference
from tests.ops.operands import assert_same_bits, exact_stats, random_24


def check_integers(sampled_squared_relu_24, columns, v, contiguous, *, tokens=500, dim=128, neurons=256):
    """Of integers, whose products add up exactly in any order, it keeps what the reference keeps."""
    rng = np.random.default_rng(0)
    w = random_24(neurons, dim, jnp.bfloat16, seed=1)
    w = dataclasses.replace(w, values=jnp.asarray(rng.integers(-2, 3, w.values.shape), jnp.bfloat16))
    x = jnp.asarray(rng.integers(-2, 3, (tokens, dim)), jnp.bfloat16)
    ours, stats = jax.jit(lambda *args: sampled_squared_relu_24(*args, v, contiguous=contiguous))(w, x, columns)
    expected, wanted = jax.jit(lambda *args: reference.sampled_squared_relu_24(*args, v, contiguous=contiguous))(
        w, x, columns
    )
    assert_same_bits((ours, stats.nonzeros), (expected, wanted.nonzeros))
    h = reference.sampled_matmul_24(w, x, columns, v, contiguous=contiguous, out_dtype=x.dtype)
    np.testing.assert_allclose(stats, exact_stats(h, expected.values), rtol=1e-5)
