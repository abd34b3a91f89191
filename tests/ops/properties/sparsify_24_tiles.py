"""Of `sparsify_24_tiles`."""

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lm.ops import reference, transposable_mask
from tests.ops.operands import assert_same_bits, random, random_or_special

KINDS = ["integers", "special", "masked"]


def check(sparsify_24_tiles, kind, dtype, out):
    """The same bits as the reference's, twice: sums of integers are the same in any order, and so are the patterns."""
    for shape in [(64, 64), (256, 704), (100, 300), (7, 10)]:
        rng = np.random.default_rng(6)
        integers = jnp.asarray(rng.integers(-9, 10, shape), dtype)
        x = random_or_special(shape, dtype, 7, special=True) if kind == "special" else integers
        mask = jnp.asarray(rng.random(shape) < 0.5) if kind == "masked" else None
        expected = jax.jit(lambda x, mask: reference.sparsify_24_tiles(x, mask, dtype=out))(x, mask)
        compute = jax.jit(lambda x, mask: sparsify_24_tiles(x, mask, dtype=out))
        for _ in range(2):
            assert_same_bits(compute(x, mask), expected)


def check_keeps_as_much(sparsify_24_tiles):
    """As the reference, of random numbers, whose sums round."""
    x = random((512, 1024), jnp.float32, seed=8)
    rows, columns = sparsify_24_tiles(x, None, dtype=jnp.bfloat16)
    mask = np.asarray(rows.mask())
    np.testing.assert_array_equal(mask, np.asarray(columns.mask()).T)
    tiles = mask.reshape(128, 4, 256, 4)
    assert (tiles.sum(1) == 2).all() and (tiles.sum(3) == 2).all()
    best = np.asarray(transposable_mask(x))
    np.testing.assert_allclose(np.abs(x)[mask].sum(), np.abs(x)[best].sum(), rtol=1e-6)
