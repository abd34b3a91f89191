import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper
from sparse_lm.ops.hopper.products.sampled_matmul_24 import CANDIDATES
from tests.ops.operands import assert_same_bits, random, random_24, random_contiguous
from tests.ops.properties import sampled_squared_relu_24 as properties

SHAPES = [  # tokens, dim, neurons, kept, contiguous
    (1000, 333, 1280, 640, 128),
    (300, 64, 768, 192, 64),
    (1, 100, 256, 64, 64),
    (1536, 1024, 4096, 1024, 256),
]


def _lists(tokens, neurons, kept, contiguous, v):
    """Lists of a few blocks' clusters, the last of several blocks empty."""
    columns = random_contiguous(-(-tokens // v), kept, contiguous, neurons, seed=2)
    return columns.at[-1].set(neurons) if columns.shape[0] > 1 else columns


@pytest.mark.gpu
@pytest.mark.parametrize("config", [config for config, _ in CANDIDATES])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("tokens, dim, neurons, kept, contiguous", SHAPES)
def test_equals_the_two_kernels_bit_for_bit(tokens, dim, neurons, kept, contiguous, dtype, config):
    w, x = random_24(neurons, dim, dtype, seed=0, scale=0.1), random((tokens, dim), dtype, seed=1)
    columns = _lists(tokens, neurons, kept, contiguous, config.tile_n)
    product = dict(v=config.tile_n, contiguous=contiguous, config=config)

    def two_kernels(w, x, columns):
        return hopper.squared_relu_24(hopper.sampled_matmul_24(w, x, columns, **product))

    fused = jax.jit(lambda w, x, columns: hopper.sampled_squared_relu_24(w, x, columns, **product))
    expected = jax.jit(two_kernels)(w, x, columns)
    for _ in range(3):
        assert_same_bits(fused(w, x, columns), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("contiguous, v", [(128, 128), (64, 64), (1, 64)])
def test_keeps_what_the_reference_keeps(contiguous, v):
    """Of runs or blocks that no tile fits, too."""
    columns = random_contiguous(-(-500 // v), 128, contiguous, 256, seed=5)
    properties.check_integers(hopper.sampled_squared_relu_24, columns, v, contiguous)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers(bad):
    w, x = random_24(512, 256, jnp.bfloat16, seed=6), random((512, 256), jnp.bfloat16, seed=7).at[77, 5].set(bad)
    columns = random_contiguous(4, 256, 128, 512, seed=8)
    y, _ = hopper.sampled_squared_relu_24(w, x, columns, 128, contiguous=128)
    expected, _ = hopper.squared_relu_24(hopper.sampled_matmul_24(w, x, columns, 128, contiguous=128))
    for ours, theirs in ((y.metadata, expected.metadata), (y.values, expected.values)):
        np.testing.assert_array_equal(np.asarray(ours).view(np.uint8), np.asarray(theirs).view(np.uint8))
    assert not np.isfinite(np.asarray(y.values, np.float32)[77]).all()
    assert np.isfinite(np.delete(np.asarray(y.values, np.float32), 77, axis=0)).all()
