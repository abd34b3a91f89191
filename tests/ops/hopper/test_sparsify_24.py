import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper, reference, transposable_mask
from tests.ops.operands import assert_same_bits, random, random_or_special
from tests.ops.properties import sparsify_24 as properties


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
@pytest.mark.parametrize("kind", ["integers", "special", "masked"])
def test_tiles(kind, dtype, out):
    """Sums of integers are the same in any order, and so then are the patterns."""
    for shape in [(64, 64), (256, 704), (100, 300), (7, 10)]:
        rng = np.random.default_rng(6)
        integers = jnp.asarray(rng.integers(-9, 10, shape), dtype)
        x = random_or_special(shape, dtype, 7, special=True) if kind == "special" else integers
        mask = jnp.asarray(rng.random(shape) < 0.5) if kind == "masked" else None
        expected = jax.jit(lambda x, mask: reference.sparsify_24_tiles(x, mask, dtype=out))(x, mask)
        for _ in range(2):
            result = jax.jit(lambda x, mask: hopper.sparsify_24_tiles(x, mask, dtype=out))(x, mask)
            assert_same_bits(result, expected)


@pytest.mark.gpu
def test_tiles_keep_as_much_as_the_reference():
    x = random((512, 1024), jnp.float32, seed=8)
    rows, columns = hopper.sparsify_24_tiles(x, None, dtype=jnp.bfloat16)
    mask = np.asarray(rows.mask())
    np.testing.assert_array_equal(mask, np.asarray(columns.mask()).T)
    tiles = mask.reshape(128, 4, 256, 4)
    assert (tiles.sum(1) == 2).all() and (tiles.sum(3) == 2).all()
    best = np.asarray(transposable_mask(x))
    np.testing.assert_allclose(np.abs(x)[mask].sum(), np.abs(x)[best].sum(), rtol=1e-6)


def test_refuses_what_it_cannot_do():
    options = dict(scale=1.0, key=None)
    x = jnp.zeros((64, 64), jnp.bfloat16)
    properties.check_refuses_other_generators(hopper.sparsify_24)
    with pytest.raises(NotImplementedError, match="16-bit"):
        hopper.sparsify_24(x, "magnitude", -1, dtype=jnp.float32, **options)
