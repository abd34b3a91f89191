"""Of `sampled_squared_relu_venom`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lm.ops import reference
from tests.ops.operands import assert_same_bits, exact_stats, random_24


def check_integers(kernel, tokens, dim, neurons, v, m, *, contiguous, dtype=jnp.bfloat16):
    """Of small integers, whose sums are exact in any order, norms too, it keeps what the reference keeps."""
    rng = np.random.default_rng(0)
    w = random_24(neurons, dim, dtype, seed=1)
    w = dataclasses.replace(w, values=jnp.asarray(rng.integers(-1, 2, w.values.shape), dtype))
    x = jnp.asarray(rng.integers(-1, 2, (tokens, dim)), dtype)
    listed, block = jnp.arange(neurons, dtype=jnp.int32)[None], -(-tokens // 768) * 768
    options = dict(block=block, v=v, m=m, contiguous=contiguous)
    ours, stats = jax.jit(lambda *args: kernel(*args, **options))(w, x, listed)
    expected, wanted = jax.jit(lambda *args: reference.sampled_squared_relu_venom(*args, **options))(w, x, listed)
    assert_same_bits((ours, stats.nonzeros), (expected, wanted.nonzeros))
    h = reference.sampled_matmul_24(w, x, listed, block, out_dtype=x.dtype)
    np.testing.assert_allclose(stats, exact_stats(h, expected.values), rtol=1e-5)
