import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper, reference

SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 3.0]


def _random(shape, dtype, seed, special):
    """Normal numbers, or a mixture of special ones, with many ties, that fills every kind of group."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.choice(SPECIAL, size=shape) if special else rng.normal(size=shape), dtype)


def _bits(x):
    return np.asarray(jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.nan, x), jnp.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    "dtype, out", [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float16)]
)
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("method", ["magnitude", "soft_threshold"])
def test_equals_the_reference_bit_for_bit(method, axis, dtype, out, special):
    for shape in [(64, 64), (256, 704), (100, 300), (1, 3)]:
        x = _random(shape, dtype, seed=0, special=special)
        options = dict(method=method, axis=axis, scale=1.4375, dtype=out, key=None)
        expected = jax.jit(lambda x, o=options: reference.sparsify_24(x, **o))(x)
        for _ in range(2):
            result = jax.jit(lambda x, o=options: hopper.sparsify_24(x, **o))(x)
            assert result.shape == expected.shape
            np.testing.assert_array_equal(result.metadata, expected.metadata)
            np.testing.assert_array_equal(_bits(result.values), _bits(expected.values))


def test_refuses_what_it_cannot_do():
    options = dict(scale=1.0, key=None)
    x = jnp.zeros((64, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="random"):
        hopper.sparsify_24(x, "mvue", -1, dtype=jnp.bfloat16, **options)
    with pytest.raises(NotImplementedError, match="16-bit"):
        hopper.sparsify_24(x, "magnitude", -1, dtype=jnp.float32, **options)
