"""`sampled_squared_relu_24` and `sampled_squared_relu_venom`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import reference
from tests.ops.kernels import each_backend
from tests.ops.operands import assert_same_bits, exact_stats, random_24, random_columns, random_contiguous


def _check_integers(backend, op, neuron_ids, block, *options, tokens, dim, neurons, largest, dtype, contiguous):
    """Checks that it keeps what the reference keeps of small integers: sums, and norms, are exact in any order."""
    rng = np.random.default_rng(0)
    w = random_24(neurons, dim, dtype, seed=1)
    w = dataclasses.replace(w, values=jnp.asarray(rng.integers(-largest, largest + 1, w.values.shape), dtype))
    x = jnp.asarray(rng.integers(-largest, largest + 1, (tokens, dim)), dtype)
    (ours, stats), (expected, wanted) = (
        jax.jit(lambda *args, f=f: f(*args, block, *options, contiguous=contiguous))(w, x, neuron_ids)
        for f in (getattr(backend, op), getattr(reference, op))
    )
    assert_same_bits((ours, stats.nonzeros), (expected, wanted.nonzeros))
    h = reference.sampled_matmul_24(w, x, neuron_ids, block, out_dtype=x.dtype)
    np.testing.assert_allclose(stats, exact_stats(h, expected.values), rtol=1e-5)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("contiguous, v", [(128, 128), (64, 64), (1, 64)])
def test_24_keeps_what_the_reference_keeps(contiguous, v, backend):
    """Some lists fit no kernel's tile; the last block lists no neuron."""
    neuron_ids = random_contiguous(-(-500 // v), 128, contiguous, 256, seed=5).at[-1].set(256)
    shape = dict(tokens=500, dim=128, neurons=256, largest=2, dtype=jnp.bfloat16)
    _check_integers(backend, "sampled_squared_relu_24", neuron_ids, v, contiguous=contiguous, **shape)


@pytest.mark.gpu
@each_backend
def test_24_of_neurons_in_any_order(backend):
    neuron_ids = random_columns(5, 200, 512, seed=3)
    shape = dict(tokens=300, dim=96, neurons=512, largest=2, dtype=jnp.bfloat16)
    _check_integers(backend, "sampled_squared_relu_24", neuron_ids, 64, contiguous=1, **shape)


def _check_venom(backend, tokens, v, m, *, contiguous=1024, dtype=jnp.bfloat16):
    """Checks a product of every neuron, for blocks of a multiple of 768 tokens."""
    neuron_ids, block = jnp.arange(1024, dtype=jnp.int32)[None], -(-tokens // 768) * 768
    shape = dict(tokens=tokens, dim=96, neurons=1024, largest=1, dtype=dtype)
    op = "sampled_squared_relu_venom"
    _check_integers(backend, op, neuron_ids, block, v, m, contiguous=contiguous, **shape)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("v, m", [(64, 8), (128, 8), (128, 16), (256, 16), (128, 32), (64, 32), (192, 16)])
@pytest.mark.parametrize("tokens", [768, 300, 1])
def test_venom_keeps_what_the_reference_keeps(tokens, v, m, dtype, backend):
    _check_venom(backend, tokens, v, m, dtype=dtype)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("v, contiguous", [(128, 1), (512, 1024)])
def test_venom_of_what_one_kernel_does_not_fit(v, contiguous, backend):
    """Neurons in any order, and blocks of Y that do not divide those of the product, are left to two kernels."""
    _check_venom(backend, 700, v, 16, contiguous=contiguous)
