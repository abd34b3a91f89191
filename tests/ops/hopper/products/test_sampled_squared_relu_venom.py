import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper, reference
from sparse_lm.ops.hopper.products.sampled_matmul_24 import CANDIDATES
from tests.ops.operands import random, random_24
from tests.ops.properties import sampled_squared_relu_venom as properties

NEURONS = 1024
LISTED = jnp.arange(NEURONS, dtype=jnp.int32)[None]  # every neuron, for 768 tokens


def _normal(tokens):
    return random_24(NEURONS, 256, jnp.bfloat16, seed=0, scale=0.1), random((tokens, 256), jnp.bfloat16, seed=1)


def _two_kernels(w, x, v, m, **product):
    h = hopper.sampled_matmul_24(w, x, LISTED, 768, contiguous=NEURONS, **product)
    return hopper.squared_relu_venom(h, v, m)


def _norms_by_the_product(w, x, v, m, **product):
    return hopper.sampled_squared_relu_venom(w, x, LISTED, 768, v, m, contiguous=NEURONS, **product)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("v, m", [(64, 8), (128, 8), (128, 16), (256, 16), (128, 32), (64, 32), (192, 16)])
@pytest.mark.parametrize("tokens", [768, 300, 1])
def test_keeps_what_the_reference_keeps(tokens, v, m, dtype):
    properties.check_integers(
        hopper.sampled_squared_relu_venom, tokens, 96, NEURONS, v, m, contiguous=NEURONS, dtype=dtype
    )


@pytest.mark.gpu
@pytest.mark.parametrize("v, contiguous", [(128, 1), (512, NEURONS)])
def test_what_is_left_to_two_kernels(v, contiguous):
    """Runs that no tile fits, and blocks of Y that do not divide those of the product."""
    properties.check_integers(hopper.sampled_squared_relu_venom, 700, 96, NEURONS, v, 16, contiguous=contiguous)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [config for config, _ in CANDIDATES])
@pytest.mark.parametrize("tokens", [768, 500])
def test_keeps_as_much_as_two_kernels(tokens, config):
    """Of normal numbers nearly equal norms may rank otherwise; hardly any do."""
    w, x = _normal(tokens)
    (y, seen), (expected, wanted) = (
        jax.jit(lambda w, x, f=f: f(w, x, 128, 16, config=config))(w, x) for f in (_norms_by_the_product, _two_kernels)
    )
    np.testing.assert_allclose(seen, wanted, rtol=1e-4)
    assert np.mean(np.asarray(y.columns) == np.asarray(expected.columns)) > 0.99


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers(bad):
    w, x = _normal(512)
    x = x.at[77, 5].set(bad)
    y, seen = jax.jit(lambda w, x: _norms_by_the_product(w, x, 128, 16))(w, x)
    _, wanted = jax.jit(lambda w, x: _two_kernels(w, x, 128, 16))(w, x)
    values = np.asarray(y.values, np.float32)
    assert not np.isfinite(values[77]).all()
    assert np.isfinite(np.delete(values, 77, axis=0)).all()
    assert seen.nonzeros == wanted.nonzeros


@pytest.mark.parametrize("config", [config for config, _ in CANDIDATES])
@pytest.mark.parametrize("tokens, v, m", [(500, 64, 8), (500, 256, 32), (1, 64, 16)])
def test_lowers_without_a_gpu(tokens, v, m, config):
    w, x = jax.eval_shape(lambda: _normal(tokens))
    lowered = jax.jit(lambda w, x: _norms_by_the_product(w, x, v, m, config=config)).trace(w, x)
    lowered = lowered.lower(lowering_platforms=("cuda",))
    h = jax.ShapeDtypeStruct((tokens, NEURONS), jnp.bfloat16)
    expected = jax.eval_shape(lambda h: reference.squared_relu_venom(h, v, m), h)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), lowered.out_info) == jax.tree.map(
        lambda a: (a.shape, a.dtype), expected
    )
    assert lowered.as_text().count("mosaic_gpu") > 1


@pytest.mark.parametrize("v, m", [(96, 16), (640, 8), (128, 12)])
def test_what_is_refused(v, m):
    w, x = jax.eval_shape(lambda: _normal(512))
    options = dict(neuron_ids=LISTED, block=64 * v, v=v, m=m, contiguous=NEURONS)
    with pytest.raises(NotImplementedError, match=f"not v = {v}, m = {m}"):
        jax.eval_shape(lambda w, x: hopper.sampled_squared_relu_venom(w, x, **options), w, x)
