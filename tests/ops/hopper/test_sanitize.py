import jax
import pytest

from sparse_lm.ops import hopper
from sparse_lm.ops.hopper.frame.compat import TRANSPOSING_LOADS
from tests.ops.hopper import sanitize


@pytest.mark.parametrize("name", sanitize.CALLS)
def test_calls_fit_the_kernels(name):
    if name.startswith("fp8") and not TRANSPOSING_LOADS:
        pytest.skip("needs a newer JAX")
    kernel, operands = sanitize.CALLS[name]()
    jax.eval_shape(kernel, *operands)


def test_no_kernel_is_left_out():
    assert {name.split(" ")[0].rstrip(",") for name in sanitize.CALLS} == set(hopper.__all__)
