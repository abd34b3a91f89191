"""Of `sparsify_24`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import reference
from tests.ops.operands import assert_same_bits, random, random_or_special


def check(sparsify_24, shape, method, axis, dtype, out, special):
    """The same bits as the reference's, twice."""
    x = random_or_special(shape, dtype, 0, special, scale=1.0)
    options = dict(method=method, axis=axis, scale=1.4375, dtype=out, key=None)
    expected = jax.jit(lambda x: reference.sparsify_24(x, **options))(x)
    compute = jax.jit(lambda x: sparsify_24(x, **options))
    for _ in range(2):
        assert_same_bits(compute(x), expected)


def check_draws(sparsify_24, shape, axis, dtype, out, special):
    """What the reference draws, twice, with several keys."""
    x, options = random_or_special(shape, dtype, 1, special, scale=1.0), dict(scale=1.4375, dtype=out)
    expected = jax.jit(lambda x, key: reference.sparsify_24(x, "mvue", axis, key=key, **options))
    compute = jax.jit(lambda x, key: sparsify_24(x, "mvue", axis, key=key, **options))
    for key in (jax.random.key(2), jax.random.fold_in(jax.random.key(3), 4)):
        wanted = expected(x, key)
        for _ in range(2):
            assert_same_bits(compute(x, key), wanted)


def check_draws_without_bias(sparsify_24):
    """The error of a mean of n draws is that of one draw, 0.47 of the signal on normal numbers, divided by n."""
    x, count = random((64, 128), jnp.bfloat16, seed=5), 2000

    @jax.jit
    def mean(keys):
        draw = lambda key: sparsify_24(x, "mvue", 0, scale=1.0, dtype=x.dtype, key=key).to_dense()  # noqa: E731
        return jnp.mean(jax.lax.map(lambda key: draw(key).astype(jnp.float32), keys), axis=0)

    exact = np.asarray(x.T, np.float32)
    error = np.square(np.asarray(mean(jax.random.split(jax.random.key(6), count))) - exact).sum()
    assert error / np.square(exact).sum() == pytest.approx(0.473 / count, rel=0.1)


def check_refuses_other_generators(sparsify_24):
    with pytest.raises(NotImplementedError, match="threefry2x32, not of rbg"):
        key = jax.random.key(0, impl="rbg")
        sparsify_24(jnp.zeros((64, 64), jnp.bfloat16), "mvue", -1, scale=1.0, dtype=jnp.bfloat16, key=key)
