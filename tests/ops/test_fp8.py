"""Products in FP8 are those of numbers rounded to e4m3 by NumPy, with scales that no other row has a part in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import fp8
from tests.ops import jitted
from tests.ops.numpy_fp8 import LARGEST, rounded, sum_over_rows


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def operands(rng, tokens=48, inputs=96, outputs=64):
    """x with rows of very different sizes, and w."""
    sizes = np.exp(rng.normal(0, 4, (tokens, 1)))
    x = rng.normal(size=(tokens, inputs)) * sizes
    return x.astype(np.float32), rng.normal(size=(outputs, inputs)).astype(np.float32) / 8


def assert_same(found, expected, precision):
    """Rows differ in size: each is held to its own largest entry."""
    error = np.abs(np.asarray(found, np.float64) - expected).max(1) / np.abs(expected).max(1)
    assert error.max() < precision


linear = jax.jit(fp8.linear)


@jax.jit
def linear_of_24(x, w):
    return fp8.times_24(ops.sparsify_24(x, "magnitude"), w.T)


PRODUCTS = pytest.mark.parametrize("product", [linear, linear_of_24], ids=["dense", "2:4"])


@PRODUCTS
@pytest.mark.parametrize("dtype, precision", [(jnp.float32, 1e-6), (jnp.bfloat16, 0.005)])
def test_what_e4m3_rounds_to_is_multiplied(rng, product, dtype, precision):
    x, w = (jnp.asarray(a, dtype) for a in operands(rng))
    o = product(x, w)
    kept = x if product is linear else jitted.dense(jitted.sparsify_24(x, "magnitude"))
    kept, w = (np.asarray(a, np.float64) for a in (kept, w))
    expected = rounded(kept, 1) @ rounded(w, None).T
    assert o.dtype == dtype
    assert_same(o, expected, precision)
    assert np.abs(expected / (kept @ w.T) - 1).max() > 1e-3  # rounding can be seen


@PRODUCTS
def test_rows_are_each_for_themselves(rng, product):
    """A row stays the same if others are large, zeros or not finite."""
    x, w = operands(rng)
    before = np.asarray(product(x, w))
    others = x.copy()
    others[1:] *= 1e4
    np.testing.assert_array_equal(product(others, w)[0], before[0])
    for bad in (0, np.inf, -np.inf, np.nan):
        spoiled = x.copy()
        spoiled[5] = 0 if bad == 0 else spoiled[5]
        spoiled[5, 7] = bad
        after = np.asarray(product(spoiled, w))
        assert not after[5].any() if bad == 0 else np.isnan(after[5]).all()
        np.testing.assert_array_equal(np.delete(after, 5, 0), np.delete(before, 5, 0))


def test_gradients_of_linear(rng):
    x, w = operands(rng)
    dy = operands(rng, outputs=1, inputs=64)[0]
    dx, dw = jax.jit(lambda x, w, dy: jax.vjp(fp8.linear, x, w)[1](dy))(x, w, dy)
    assert_same(dx, rounded(dy, 1) @ rounded(w, None), 1e-6)
    assert_same(dw, sum_over_rows(dy, x), 1e-6)
    assert dw.dtype == jnp.float32 and dx.shape == x.shape
    both = jax.eval_shape(jax.grad(lambda x, w: jnp.sum(fp8.linear(x, w)), argnums=(0, 1)), x, w.astype(jnp.bfloat16))
    assert [gradient.dtype for gradient in both] == [x.dtype, jnp.bfloat16]


@pytest.mark.parametrize("size", [1, 1e-6])
def test_a_token_without_a_gradient_takes_nothing_from_the_sum_over_the_others(rng, size):
    x, w = rng.normal(size=(512, 64)), rng.normal(size=(48, 64))
    dy = size * rng.normal(size=(512, 48))
    dy[7] = 0
    x, w, dy = (jnp.asarray(a, jnp.float32) for a in (x, w, dy))
    _, found = jax.jit(lambda x, w, dy: jax.vjp(fp8.linear, x, w)[1](dy))(x, w, dy)
    expected = np.asarray(dy, np.float64).T @ np.asarray(x, np.float64)
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def test_sum_over_rows_24_has_scales_of_neurons_and_of_features(rng):
    a, b = operands(rng)[0].T, operands(rng, inputs=40)[0] * np.exp(rng.normal(0, 4, 40)).astype(np.float32)
    sparse = jitted.sparsify_24(a)  # 2:4 along tokens
    expected = rounded(np.asarray(sparse.to_dense()), 1) @ rounded(b, 0)
    found = jax.jit(lambda a, b: fp8.sum_over_rows_24(a, b, out_dtype=jnp.float32))(sparse, b)
    assert_same(found, expected, 1e-6)
    assert_same(found.T, expected.T, 1e-6)  # columns differ in size, too


def test_scales_are_powers_of_two_that_fill_the_range(rng):
    x, w = operands(rng)
    for scaled, axis in ((fp8.by_rows(x), 1), (fp8.by_columns(x), 0), (fp8.whole(w), None)):
        values = np.abs(np.asarray(scaled.values, np.float32)).max(axis)
        assert (values <= LARGEST).all() and (values > LARGEST / 2 - 16).all()  # 16: a step of e4m3 there
        assert (np.frexp(scaled.scale)[0] == 0.5).all()
    rows = np.float32([[448.0], [449.0], [3e38], [1e-30]]) * np.float32([1, -1 / 2, 1 / 16])
    scaled = fp8.by_rows(rows)
    np.testing.assert_allclose(np.float32(scaled.values) * scaled.scale, rows, rtol=2**-4)  # nothing saturates


@PRODUCTS
def test_float16_is_refused(rng, product):
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in operands(rng))
    for given in ((x.astype(jnp.float16), w), (x, w.astype(jnp.float16))):
        with pytest.raises(ValueError, match="FP8 takes bfloat16 or float32"):
            product(*given)


@pytest.mark.gpu
def test_a_gpu_multiplies_in_fp8(rng):
    """XLA must recognise the products; else they would be right, and slow."""
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in operands(rng, 512, 256, 384))
    loss = lambda x, w: jnp.sum(jnp.square(fp8.linear(x, w)))  # noqa: E731
    compiled = functools.partial(jax.jit, compiler_options=fp8.COMPILER_OPTIONS)
    program = compiled(jax.grad(loss, argnums=(0, 1))).lower(x, w).compile().as_text()
    assert program.count("__cublas$lt$matmul$f8") >= 3
    assert '"operand_precision":["HIGHEST","HIGHEST"]' in program  # of the weight gradient
    assert_same(compiled(fp8.linear)(x, w), rounded(np.float32(x), 1) @ rounded(np.float32(w), None).T, 0.01)


def test_other_gpus_are_refused(monkeypatch):
    class Device:
        platform, device_kind, compute_capability = "gpu", "NVIDIA A100", "8.0"

    monkeypatch.setattr(fp8.jax, "devices", lambda: [Device])
    assert fp8.unavailable() == "needs an NVIDIA GPU of compute capability 8.9 or more; NVIDIA A100 has 8.0"
    Device.compute_capability = "12.0"
    assert fp8.unavailable() is None
    Device.device_kind, Device.compute_capability = "AMD Instinct MI300X", "gfx942"
    assert fp8.unavailable().endswith("8.9 or more; AMD Instinct MI300X has gfx942")
