import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper, reference, transposable_mask
from tests.ops.operands import assert_same_bits, random, random_or_special


@pytest.mark.gpu
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    "dtype, out", [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float16)]
)
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("method", ["magnitude", "soft_threshold"])
def test_equals_the_reference_bit_for_bit(method, axis, dtype, out, special):
    for shape in [(64, 64), (256, 704), (100, 300), (1, 3)]:
        x = random_or_special(shape, dtype, 0, special, scale=1.0)
        options = dict(method=method, axis=axis, scale=1.4375, dtype=out, key=None)
        expected = jax.jit(lambda x, o=options: reference.sparsify_24(x, **o))(x)
        for _ in range(2):
            result = jax.jit(lambda x, o=options: hopper.sparsify_24(x, **o))(x)
            assert_same_bits(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype, out", [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.bfloat16)])
@pytest.mark.parametrize("axis", [-1, 0])
def test_mvue_draws_what_the_reference_draws(axis, dtype, out, special):
    for shape in [(256, 704), (100, 300), (1, 3)]:
        x, options = random_or_special(shape, dtype, 1, special, scale=1.0), dict(scale=1.4375, dtype=out)
        expected = jax.jit(lambda x, key, o=options: reference.sparsify_24(x, "mvue", axis, key=key, **o))
        compute = jax.jit(lambda x, key, o=options: hopper.sparsify_24(x, "mvue", axis, key=key, **o))
        for key in (jax.random.key(2), jax.random.fold_in(jax.random.key(3), 4)):
            wanted = expected(x, key)
            for result in (compute(x, key), compute(x, key)):
                assert_same_bits(result, wanted)


@pytest.mark.gpu
def test_mvue_is_unbiased():
    """The error of a mean of n draws is that of one draw, 0.47 of the signal on normal numbers, divided by n."""
    x, count = random((64, 128), jnp.bfloat16, seed=5), 2000

    @jax.jit
    def mean(keys):
        draw = lambda key: hopper.sparsify_24(x, "mvue", 0, scale=1.0, dtype=x.dtype, key=key).to_dense()  # noqa: E731
        return jnp.mean(jax.lax.map(lambda key: draw(key).astype(jnp.float32), keys), axis=0)

    exact = np.asarray(x.T, np.float32)
    error = np.square(np.asarray(mean(jax.random.split(jax.random.key(6), count))) - exact).sum()
    assert error / np.square(exact).sum() == pytest.approx(0.473 / count, rel=0.1)


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
    with pytest.raises(NotImplementedError, match="threefry2x32, not of rbg"):
        hopper.sparsify_24(x, "mvue", -1, scale=1.0, dtype=jnp.bfloat16, key=jax.random.key(0, impl="rbg"))
    with pytest.raises(NotImplementedError, match="16-bit"):
        hopper.sparsify_24(x, "magnitude", -1, dtype=jnp.float32, **options)
