import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import reference, triton
from tests.ops.operands import exact_stats, random_24, random_runs


@pytest.mark.gpu
@pytest.mark.parametrize("run", [1, 64])
def test_keeps_what_the_reference_keeps(run):
    """Integers, whose products add up exactly in any order; the last block lists no neuron."""
    rng = np.random.default_rng(0)
    w = random_24(256, 128, jnp.bfloat16, seed=1)
    w = type(w)(jnp.asarray(rng.integers(-2, 3, w.values.shape), jnp.bfloat16), w.metadata, w.shape)
    x = jnp.asarray(rng.integers(-2, 3, (500, 128)), jnp.bfloat16)
    columns = random_runs(8, 128, run, 256, seed=2).at[-1].set(256)
    ours, stats = jax.jit(lambda *args: triton.sampled_squared_relu_24(*args, 64, run=run))(w, x, columns)
    expected, _ = jax.jit(lambda *args: reference.sampled_squared_relu_24(*args, 64, run=run))(w, x, columns)
    np.testing.assert_array_equal(ours.values, expected.values)
    np.testing.assert_array_equal(ours.metadata, expected.metadata)
    h = reference.sampled_matmul_24(w, x, columns, 64, run=run, out_dtype=x.dtype)
    np.testing.assert_allclose(stats, exact_stats(h, expected.values), rtol=1e-5)
