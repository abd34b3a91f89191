"""Products whose epilogue is the squared ReLU, against the product and the pass after it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper, reference
from sparse_lm.ops.hopper.products.sampled_matmul_24 import CANDIDATES
from tests.ops.operands import assert_same_bits, random, random_24, random_contiguous

each_tiling = pytest.mark.parametrize("config", [config for config, _ in CANDIDATES])
NEURONS = 1024
ALL = jnp.arange(NEURONS, dtype=jnp.int32)[None]  # every neuron, for 768 tokens


@pytest.mark.gpu
@each_tiling
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "tokens, dim, neurons, kept, contiguous",
    [(1000, 333, 1280, 640, 128), (300, 64, 768, 192, 64), (1, 100, 256, 64, 64), (1536, 1024, 4096, 1024, 256)],
)
def test_24_equals_two_kernels_bit_for_bit(tokens, dim, neurons, kept, contiguous, dtype, config):
    """The last of several blocks lists no neuron."""
    w, x = random_24(neurons, dim, dtype, seed=0, scale=0.1), random((tokens, dim), dtype, seed=1)
    neuron_ids = random_contiguous(-(-tokens // config.tile_n), kept, contiguous, neurons, seed=2)
    neuron_ids = neuron_ids.at[-1].set(neurons) if neuron_ids.shape[0] > 1 else neuron_ids
    product = dict(v=config.tile_n, contiguous=contiguous, config=config)

    def two_kernels(w, x, neuron_ids):
        return hopper.squared_relu_24(hopper.sampled_matmul_24(w, x, neuron_ids, **product))

    fused = jax.jit(lambda *args: hopper.sampled_squared_relu_24(*args, **product))
    expected = jax.jit(two_kernels)(w, x, neuron_ids)
    for _ in range(3):
        assert_same_bits(fused(w, x, neuron_ids), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_24_of_bad_numbers(bad):
    w, x = random_24(512, 256, jnp.bfloat16, seed=6), random((512, 256), jnp.bfloat16, seed=7).at[77, 5].set(bad)
    neuron_ids = random_contiguous(4, 256, 128, 512, seed=8)
    y, _ = hopper.sampled_squared_relu_24(w, x, neuron_ids, 128, contiguous=128)
    expected, _ = hopper.squared_relu_24(hopper.sampled_matmul_24(w, x, neuron_ids, 128, contiguous=128))
    for ours, theirs in ((y.metadata, expected.metadata), (y.values, expected.values)):
        np.testing.assert_array_equal(np.asarray(ours).view(np.uint8), np.asarray(theirs).view(np.uint8))
    _assert_bad_row(y, 77)


def _assert_bad_row(y, row):
    values = np.asarray(y.values, np.float32)
    assert not np.isfinite(values[row]).all()
    assert np.isfinite(np.delete(values, row, axis=0)).all()


def _normal(tokens):
    return random_24(NEURONS, 256, jnp.bfloat16, seed=0, scale=0.1), random((tokens, 256), jnp.bfloat16, seed=1)


def _two_kernels(w, x, v, m, **product):
    h = hopper.sampled_matmul_24(w, x, ALL, 768, contiguous=NEURONS, **product)
    return hopper.squared_relu_venom(h, v, m)


def _norms_by_the_product(w, x, v, m, **product):
    return hopper.sampled_squared_relu_venom(w, x, ALL, 768, v, m, contiguous=NEURONS, **product)


@pytest.mark.gpu
@each_tiling
@pytest.mark.parametrize("tokens", [768, 500])
def test_venom_keeps_as_much_as_two_kernels(tokens, config):
    """Nearly equal norms of normal numbers may rank otherwise; hardly any do."""
    w, x = _normal(tokens)
    (y, seen), (expected, wanted) = (
        jax.jit(lambda w, x, f=f: f(w, x, 128, 16, config=config))(w, x) for f in (_norms_by_the_product, _two_kernels)
    )
    np.testing.assert_allclose(seen, wanted, rtol=1e-4)
    assert np.mean(np.asarray(y.columns) == np.asarray(expected.columns)) > 0.99


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_venom_of_bad_numbers(bad):
    w, x = _normal(512)
    x = x.at[77, 5].set(bad)
    y, seen = jax.jit(lambda w, x: _norms_by_the_product(w, x, 128, 16))(w, x)
    _, wanted = jax.jit(lambda w, x: _two_kernels(w, x, 128, 16))(w, x)
    _assert_bad_row(y, 77)
    assert seen.nonzeros == wanted.nonzeros


@each_tiling
@pytest.mark.parametrize("tokens, v, m", [(500, 64, 8), (500, 256, 32), (1, 64, 16)])
def test_venom_lowers_without_a_gpu(tokens, v, m, config):
    w, x = jax.eval_shape(lambda: _normal(tokens))
    lowered = jax.jit(lambda w, x: _norms_by_the_product(w, x, v, m, config=config)).trace(w, x)
    lowered = lowered.lower(lowering_platforms=("cuda",))
    h = jax.ShapeDtypeStruct((tokens, NEURONS), jnp.bfloat16)
    expected = jax.eval_shape(lambda h: reference.squared_relu_venom(h, v, m), h)
    assert jax.tree.leaves(lowered.out_info) == jax.tree.leaves(expected)
    assert lowered.as_text().count("mosaic_gpu") > 1


@pytest.mark.parametrize("v, m", [(96, 16), (640, 8), (128, 12)])
def test_blocks_that_venom_refuses(v, m):
    w, x = jax.eval_shape(lambda: _normal(512))
    options = dict(neuron_ids=ALL, block=64 * v, v=v, m=m, contiguous=NEURONS)
    with pytest.raises(NotImplementedError, match=f"not v = {v}, m = {m}"):
        jax.eval_shape(lambda w, x: hopper.sampled_squared_relu_venom(w, x, **options), w, x)
