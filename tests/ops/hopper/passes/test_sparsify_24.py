import jax.numpy as jnp
import pytest

from sparse_lm.ops import hopper
from tests.ops.properties import sparsify_24 as properties
from tests.ops.properties import sparsify_24_tiles


@pytest.mark.gpu
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    "dtype, out", [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float16)]
)
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("method", ["magnitude", "soft_threshold"])
def test_equals_the_reference_bit_for_bit(method, axis, dtype, out, special):
    for shape in [(64, 64), (256, 704), (100, 300), (1, 3)]:
        properties.check(hopper.sparsify_24, shape, method, axis, dtype, out, special)


@pytest.mark.gpu
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype, out", [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.bfloat16)])
@pytest.mark.parametrize("axis", [-1, 0])
def test_mvue_draws_what_the_reference_draws(axis, dtype, out, special):
    for shape in [(256, 704), (100, 300), (1, 3)]:
        properties.check_draws(hopper.sparsify_24, shape, axis, dtype, out, special)


@pytest.mark.gpu
def test_mvue_is_unbiased():
    properties.check_draws_without_bias(hopper.sparsify_24)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out", [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.bfloat16)])
@pytest.mark.parametrize("kind", sparsify_24_tiles.KINDS)
def test_tiles(kind, dtype, out):
    sparsify_24_tiles.check(hopper.sparsify_24_tiles, kind, dtype, out)


@pytest.mark.gpu
def test_tiles_keep_as_much_as_the_reference():
    sparsify_24_tiles.check_keeps_as_much(hopper.sparsify_24_tiles)


def test_refuses_what_it_cannot_do():
    options = dict(scale=1.0, key=None)
    x = jnp.zeros((64, 64), jnp.bfloat16)
    properties.check_refuses_other_generators(hopper.sparsify_24)
    with pytest.raises(NotImplementedError, match="16-bit"):
        hopper.sparsify_24(x, "magnitude", -1, dtype=jnp.float32, **options)
