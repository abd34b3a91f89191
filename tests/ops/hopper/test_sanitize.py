import jax
import pytest

from sparse_lm.ops import hopper, reference
from sparse_lm.ops.hopper.frame.compat import TRANSPOSING_LOADS
from tests.ops.hopper import sanitize

PASSES = "sparsify_24", "sparsify_venom", "soft_threshold_24", "squared_relu", "gated"


@pytest.mark.parametrize("name", sanitize.CALLS)
def test_every_kernel_lowers_without_a_gpu(name, monkeypatch):
    """Passes return the shapes and dtypes that the reference returns."""
    if name.startswith("fp8") and not TRANSPOSING_LOADS:
        pytest.skip("needs a newer JAX")
    kernel, operands = sanitize.CALLS[name]()
    lowered = jax.jit(kernel).trace(*operands).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
    if name.startswith(PASSES):
        monkeypatch.setattr(sanitize, "hopper", reference)
        expected, _ = sanitize.CALLS[name]()
        assert jax.tree.leaves(lowered.out_info) == jax.tree.leaves(jax.eval_shape(expected, *operands))


def test_no_kernel_is_left_out():
    assert {name.split(" ")[0].rstrip(",") for name in sanitize.CALLS} == set(hopper.__all__)
