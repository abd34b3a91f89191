"""The passes over the hidden layer and over the weights: bit for bit the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper, reference
from sparse_lm.ops.compress import to_venom
from tests.ops.operands import assert_same_bits, exact_stats, integers_and_special, random_or_special
from tests.ops.properties import squared_relu_gradients as properties

SHAPES = [(64, 64), (256, 704), (100, 300), (1, 3)]


def _lower(function, *shapes, **options):
    return jax.jit(lambda *args: function(*args, **options)).trace(*shapes).lower(lowering_platforms=("cuda",))


def _like(function, *shapes):
    return jax.eval_shape(function, *shapes)


@pytest.mark.parametrize("shape", SHAPES)
def test_lowers_without_a_gpu(shape):
    h = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    expected = _like(reference.squared_relu_24, h)
    assert _lower(hopper.squared_relu_24, h).out_info == expected
    gradients = _like(reference.squared_relu_gradients, h, expected[0])
    for key in (None, jax.random.key(0)):
        assert _lower(hopper.squared_relu_gradients, h, expected[0], key=key).out_info == gradients


@pytest.mark.gpu
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_squared_relu_24(shape, dtype, special):
    h = random_or_special(shape, dtype, 0, special)
    expected, _ = jax.jit(reference.squared_relu_24)(h)
    for _ in range(2):
        ours, stats = jax.jit(hopper.squared_relu_24)(h)
        assert_same_bits(ours, expected)
    np.testing.assert_allclose(stats, exact_stats(h, expected.values), rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_squared_relu_gradients(shape, dtype, special, drawn):
    properties.check_24(hopper.squared_relu_gradients, shape, dtype, special=special, drawn=drawn)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "m, v, drawn",
    [
        (8, 64, False),
        (16, 128, False),
        (16, 256, False),
        (32, 128, False),
        (8, 64, True),
        (16, 128, True),
        (32, 128, True),
    ],
)
@pytest.mark.parametrize("tokens", [256, 300])
def test_squared_relu_gradients_of_a_venom_matrix(tokens, m, v, drawn):
    properties.check_venom(hopper.squared_relu_gradients, tokens, 1024, v, m, drawn=drawn)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-12, 1e10, 1e19])
def test_numbers_of_any_scale(scale):
    """Of the largest, some squares are inf."""
    h, dy = (random_or_special((64, 128), jnp.bfloat16, seed, scale=scale) for seed in range(2))
    y, _ = jax.jit(reference.squared_relu_24)(h)
    assert_same_bits(jax.jit(hopper.squared_relu_24)(h)[0], y)
    assert_same_bits(jax.jit(hopper.squared_relu_gradients)(dy, y), jax.jit(reference.squared_relu_gradients)(dy, y))


@pytest.mark.parametrize("v, m", [(64, 8), (128, 8), (128, 16), (256, 16), (128, 32)])
def test_venom_lowers_without_a_gpu(v, m):
    h = jax.ShapeDtypeStruct((300, 1024), jnp.bfloat16)
    options = dict(v=v, m=m)
    expected = _like(lambda h: reference.squared_relu_venom(h, **options), h)
    assert _lower(lambda h: hopper.squared_relu_venom(h, **options), h).out_info == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("v, m", [(64, 8), (128, 8), (128, 16), (256, 16), (128, 32), (256, 32), (64, 32), (512, 16)])
@pytest.mark.parametrize("tokens", [512, 300])
def test_venom(tokens, v, m, dtype):
    """Integers, whose squares add up exactly in any order: so do the norms that columns are chosen by."""
    x = jnp.asarray(np.random.default_rng(7).integers(-8, 9, (tokens, 1024)), dtype)
    y_expected, stats_expected = jax.jit(lambda x: reference.squared_relu_venom(x, v, m))(x)
    expected = jax.jit(lambda x: reference.sparsify_venom(x, v, m, dtype=dtype))(x)
    for _ in range(2):
        y, stats = jax.jit(lambda x: hopper.squared_relu_venom(x, v, m))(x)
        assert_same_bits(y, y_expected)
        assert_same_bits(jax.jit(lambda x: hopper.sparsify_venom(x, v, m, dtype=dtype))(x), expected)
    np.testing.assert_allclose(stats, stats_expected, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("special", [0.0, -0.0, np.inf, np.nan])
def test_venom_of_special_numbers(special):
    x = integers_and_special(special, jnp.bfloat16)
    for f in ("squared_relu_venom", "sparsify_venom"):
        options = {} if f == "squared_relu_venom" else dict(dtype=x.dtype)
        ours, expected = (
            jax.jit(lambda x, b=b, f=f, o=options: vars(b)[f](x, 128, 16, **o))(x) for b in (hopper, reference)
        )
        assert_same_bits(*(y[0] if f == "squared_relu_venom" else y for y in (ours, expected)))


@pytest.mark.gpu
def test_venom_keeps_as_much_as_the_reference():
    """Of normal numbers nearly equal norms may rank otherwise; what is kept is then as large."""
    h = random_or_special((512, 2048), jnp.bfloat16, 8)
    for f in (hopper, reference):
        y, stats = jax.jit(lambda h, f=f: f.squared_relu_venom(h, 128, 16))(h)
        mask = np.asarray(y.mask())
        y_all = np.square(np.maximum(np.asarray(h, np.float32), 0))
        np.testing.assert_allclose(stats.kept_energy, np.square(y_all[mask]).sum(), rtol=1e-2)
        assert (np.asarray(y.columns).reshape(4, -1, 4) // 16 == np.arange(128)[:, None]).all()
        assert (mask.reshape(-1, 4).sum(1) <= 4).all() and mask.sum() == h.size // 8


@pytest.mark.gpu
@pytest.mark.parametrize("shape, layers", [((256, 128), 2), ((128, 200), 1), ((3 * 64, 64), 3)])
def test_soft_threshold_24(shape, layers):
    w, scale = random_or_special(shape, jnp.float32, 5), jnp.linspace(1, 2, layers)
    compute = {
        name: jax.jit(lambda w, s, f=f: f.soft_threshold_24(w, s, dtype=jnp.bfloat16))
        for name, f in (("ours", hopper), ("expected", reference))
    }
    assert_same_bits(compute["ours"](w, scale), compute["expected"](w, scale))


def test_what_is_refused():
    y = _like(reference.squared_relu_24, jax.ShapeDtypeStruct((64, 64), jnp.float32))[0]
    with pytest.raises(NotImplementedError, match="bfloat16 or float16"):
        hopper.squared_relu_24(jnp.zeros((64, 64)))
    with pytest.raises(NotImplementedError, match="one dtype"):
        hopper.squared_relu_gradients(jnp.zeros((64, 64), jnp.bfloat16), y)
    runs = jnp.arange(256, dtype=jnp.int32)[None]
    h = jnp.zeros((64, 256), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="threefry2x32, not of rbg"):
        hopper.squared_relu_gradients(h, reference.squared_relu_24(h)[0], key=jax.random.key(0, impl="rbg"))
    y = to_venom(reference.squared_relu_24(h)[0], runs, width=1024, v=64, m=16, contiguous=64)
    with pytest.raises(NotImplementedError, match="four of each 16, not 64 contiguous"):
        hopper.squared_relu_gradients(h, y)
    for v, m in ((96, 16), (640, 8), (512, 32), (128, 12)):
        with pytest.raises(NotImplementedError, match=f"not v = {v}, m = {m}"):
            hopper.squared_relu_venom(jnp.zeros((1280, 1536), jnp.bfloat16), v, m)
    with pytest.raises(NotImplementedError, match="a multiple of 64 rows, not for 96"):
        hopper.soft_threshold_24(jnp.zeros((192, 64)), jnp.ones(2), dtype=jnp.bfloat16)
