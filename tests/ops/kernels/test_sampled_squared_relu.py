"""`sampled_squared_relu_24`: as the reference of integers, and on Hopper as the product and the pass after it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper, reference
from sparse_lm.ops.hopper.products.sampled_matmul_24 import CANDIDATES
from tests.ops.kernels import each_backend
from tests.ops.operands import assert_same_bits, exact_stats, random, random_24, random_columns, random_contiguous


def _check_integers(backend, neuron_ids, v, *, tokens, dim, neurons, contiguous):
    """Checks that it keeps what the reference keeps of small integers: sums are exact in any order."""
    rng = np.random.default_rng(0)
    w = random_24(neurons, dim, jnp.bfloat16, seed=1)
    w = dataclasses.replace(w, values=jnp.asarray(rng.integers(-2, 3, w.values.shape), jnp.bfloat16))
    x = jnp.asarray(rng.integers(-2, 3, (tokens, dim)), jnp.bfloat16)
    (ours, stats), (expected, wanted) = (
        jax.jit(lambda *args, f=f: f(*args, v, contiguous=contiguous))(w, x, neuron_ids)
        for f in (backend.sampled_squared_relu_24, reference.sampled_squared_relu_24)
    )
    assert_same_bits((ours, stats.nonzeros), (expected, wanted.nonzeros))
    h = reference.sampled_matmul_24(w, x, neuron_ids, v, out_dtype=x.dtype)
    np.testing.assert_allclose(stats, exact_stats(h, expected.values), rtol=1e-5)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("contiguous, v", [(128, 128), (64, 64), (1, 64)])
def test_keeps_what_the_reference_keeps(contiguous, v, backend):
    """Some lists fit no kernel's tile; the last block lists no neuron."""
    neuron_ids = random_contiguous(-(-500 // v), 128, contiguous, 256, seed=5).at[-1].set(256)
    _check_integers(backend, neuron_ids, v, tokens=500, dim=128, neurons=256, contiguous=contiguous)


@pytest.mark.gpu
@each_backend
def test_of_neurons_in_any_order(backend):
    neuron_ids = random_columns(5, 200, 512, seed=3)
    _check_integers(backend, neuron_ids, 64, tokens=300, dim=96, neurons=512, contiguous=1)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [config for config, _ in CANDIDATES])
@pytest.mark.parametrize("dtype, bad", [(jnp.bfloat16, np.nan), (jnp.float16, np.inf)])
@pytest.mark.parametrize(
    "tokens, dim, neurons, kept, contiguous",
    [(1000, 333, 1280, 640, 128), (300, 64, 768, 192, 64), (1, 100, 256, 64, 64), (1536, 1024, 4096, 1024, 256)],
)
def test_equals_two_kernels_bit_for_bit(tokens, dim, neurons, kept, contiguous, dtype, bad, config):
    """The last of several blocks lists no neuron, and one of several tokens has a bad number."""
    w, x = random_24(neurons, dim, dtype, seed=0, scale=0.1), random((tokens, dim), dtype, seed=1)
    x = x.at[77, 5].set(bad) if tokens > 1 else x
    neuron_ids = random_contiguous(-(-tokens // config.tile_n), kept, contiguous, neurons, seed=2)
    neuron_ids = neuron_ids.at[-1].set(neurons) if neuron_ids.shape[0] > 1 else neuron_ids
    product = dict(v=config.tile_n, contiguous=contiguous, config=config)

    def two_kernels(w, x, neuron_ids):
        return hopper.squared_relu_24(hopper.sampled_matmul_24(w, x, neuron_ids, **product))

    fused = jax.jit(lambda *args: hopper.sampled_squared_relu_24(*args, **product))
    expected = jax.jit(two_kernels)(w, x, neuron_ids)
    for _ in range(3):
        assert_same_bits(fused(w, x, neuron_ids), expected)
