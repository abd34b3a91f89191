import pytest

from sparse_lm.ops import triton
from tests.ops.operands import random_columns, random_contiguous
from tests.ops.properties import sampled_squared_relu_24, sampled_squared_relu_venom


@pytest.mark.gpu
@pytest.mark.parametrize("contiguous", [1, 64])
def test_24_keeps_what_the_reference_keeps(contiguous):
    """The last block lists no neuron."""
    neuron_ids = random_contiguous(8, 128, contiguous, 256, seed=2).at[-1].set(256)
    sampled_squared_relu_24.check_integers(triton.sampled_squared_relu_24, neuron_ids, 64, contiguous)


@pytest.mark.gpu
def test_24_of_neurons_in_any_order():
    neuron_ids, shape = random_columns(5, 200, 512, seed=3), dict(tokens=300, dim=96, neurons=512)
    sampled_squared_relu_24.check_integers(triton.sampled_squared_relu_24, neuron_ids, 64, 1, **shape)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [768, 300])
def test_venom_keeps_what_the_reference_keeps(tokens):
    kernel = triton.sampled_squared_relu_venom
    sampled_squared_relu_venom.check_integers(kernel, tokens, 96, 512, 64, 16, contiguous=512)
