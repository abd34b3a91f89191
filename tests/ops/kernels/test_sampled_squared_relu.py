"""`sampled_squared_relu_24`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import reference
from tests.ops.kernels import each_backend
from tests.ops.operands import assert_same_bits, exact_stats, random_24, random_columns, random_contiguous


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
