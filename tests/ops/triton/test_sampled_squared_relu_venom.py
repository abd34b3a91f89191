import pytest

from sparse_lm.ops import triton
from tests.ops.properties import sampled_squared_relu_venom as properties


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [768, 300])
def test_keeps_what_the_reference_keeps(tokens):
    properties.check_integers(triton.sampled_squared_relu_venom, tokens, 96, 512, 64, 16, contiguous=512)
