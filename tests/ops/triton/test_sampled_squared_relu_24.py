import pytest

from sparse_lm.ops import triton
from tests.ops.operands import random_columns, random_contiguous
from tests.ops.properties import sampled_squared_relu_24 as properties


@pytest.mark.gpu
@pytest.mark.parametrize("contiguous", [1, 64])
def test_keeps_what_the_reference_keeps(contiguous):
    """The last block lists no neuron."""
    columns = random_contiguous(8, 128, contiguous, 256, seed=2).at[-1].set(256)
    properties.check_integers(triton.sampled_squared_relu_24, columns, 64, contiguous)


@pytest.mark.gpu
def test_columns_in_any_order():
    columns = random_columns(5, 200, 512, seed=3)
    properties.check_integers(triton.sampled_squared_relu_24, columns, 64, 1, tokens=300, dim=96, neurons=512)
