"""Products in FP8 are those of numbers rounded to e4m3 by NumPy, with scales that no other row has a part in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import fp8
from tests.ops import jitted
from tests.ops.numpy_fp8 import LARGEST, rounded


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


def test_linear_multiplies_what_e4m3_rounds_to(rng):
    x, w = operands(rng)
    expected = rounded(x, 1) @ rounded(w, None).T
    assert_same(jax.jit(fp8.linear)(x, w), expected, 1e-6)
    assert_same(jax.jit(fp8.linear)(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)), expected, 0.05)
    assert np.abs(expected / (x.astype(np.float64) @ w.T) - 1).max() > 1e-3  # rounding can be seen


def test_gradients_of_linear(rng):
    x, w = operands(rng)
    dy = operands(rng, outputs=1, inputs=64)[0]
    _, vjp = jax.vjp(fp8.linear, x, w)
    dx, dw = jax.jit(vjp)(dy)
    assert_same(dx, rounded(dy, 1) @ rounded(w, None), 1e-6)
    scale = np.asarray(fp8.by_rows(dy).scale, np.float64)
    assert_same(dw, (rounded(dy, 1) / scale).T @ rounded(x * scale, 0), 1e-6)
    assert dw.dtype == jnp.float32 and dx.shape == x.shape


def test_leading_axes_are_tokens(rng):
    x, w = operands(rng)
    o = fp8.linear(x.reshape(2, 4, 6, -1), w)
    np.testing.assert_array_equal(o.reshape(48, -1), fp8.linear(x, w))


def test_scales_are_powers_of_two_that_fill_the_range(rng):
    x, w = operands(rng)
    for scaled, axis in ((fp8.by_rows(x), 1), (fp8.by_columns(x), 0), (fp8.whole(w), None)):
        values = np.abs(np.asarray(scaled.values, np.float32)).max(axis)
        assert (values <= LARGEST).all() and (values > LARGEST / 2 - 16).all()  # 16: a step of e4m3 there
        assert (np.frexp(scaled.scale)[0] == 0.5).all()


@pytest.mark.parametrize("largest", [448.0, 449.0, 1.0, 3e38, 1e-30])
def test_nothing_saturates(largest):
    x = np.float32([[largest, -largest / 2, largest / 16]])
    scaled = fp8.by_rows(x)
    np.testing.assert_allclose(np.float32(scaled.values) * scaled.scale, x, rtol=2**-4)


def test_a_row_of_zeros_stays_zero():
    scaled = fp8.by_rows(np.zeros((2, 16), np.float32))
    assert np.isfinite(scaled.scale).all() and not np.float32(scaled.values).any()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_spoils_its_row_alone(rng, bad):
    x, w = operands(rng)
    spoiled = x.copy()
    spoiled[5, 7] = bad
    before, after = np.asarray(fp8.linear(x, w)), np.asarray(fp8.linear(spoiled, w))
    assert np.isnan(after[5]).all()
    np.testing.assert_array_equal(np.delete(after, 5, 0), np.delete(before, 5, 0))


def test_a_row_depends_on_no_other(rng):
    x, w = operands(rng)
    others = x.copy()
    others[1:] *= 1e4
    np.testing.assert_array_equal(fp8.linear(x, w)[0], fp8.linear(others, w)[0])


# Products with a 2:4 operand.


def test_times_24_multiplies_what_e4m3_rounds_to(rng):
    a, w = operands(rng, tokens=50)
    sparse = jitted.sparsify_24(a)
    expected = rounded(np.asarray(sparse.to_dense()), 1) @ rounded(w, None).T
    assert_same(times_24(sparse, w.T), expected, 1e-6)
    low = jitted.sparsify_24(jnp.asarray(a, jnp.bfloat16))
    o = times_24(low, jnp.asarray(w.T, jnp.bfloat16))
    expected = rounded(np.asarray(low.to_dense(), np.float64), 1) @ rounded(np.asarray(w, jnp.bfloat16), None).T
    assert o.dtype == jnp.bfloat16 and o.shape == (50, 64)
    assert_same(o, expected, 0.005)


def test_sum_over_rows_24_has_scales_of_neurons_and_of_features(rng):
    a, b = operands(rng)[0].T, operands(rng, inputs=40)[0] * np.exp(rng.normal(0, 4, 40)).astype(np.float32)
    sparse = jitted.sparsify_24(a)  # 2:4 along tokens
    expected = rounded(np.asarray(sparse.to_dense()), 1) @ rounded(b, 0)
    found = jax.jit(lambda a, b: fp8.sum_over_rows_24(fp8.by_rows_24(a), b, jnp.float32))(sparse, b)
    assert_same(found, expected, 1e-6)
    assert_same(found.T, expected.T, 1e-6)  # columns differ in size, too


def test_rows_of_a_24_matrix_are_each_for_themselves(rng):
    a, w = operands(rng)
    others, zeros = a.copy(), a.copy()
    others[1:] *= 1e4
    zeros[3] = 0
    o = times_24(jitted.sparsify_24(a), w.T)
    np.testing.assert_array_equal(o[0], times_24(jitted.sparsify_24(others), w.T)[0])
    without = times_24(jitted.sparsify_24(zeros), w.T)
    assert not np.any(without[3])
    np.testing.assert_array_equal(np.delete(without, 3, 0), np.delete(o, 3, 0))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_spoils_its_row_of_a_24_matrix_alone(rng, bad):
    a, w = operands(rng)
    spoiled = a.copy()
    spoiled[5, 7] = bad
    before, after = (np.asarray(times_24(jitted.sparsify_24(x), w.T)) for x in (a, spoiled))
    assert np.isnan(after[5]).all()
    np.testing.assert_array_equal(np.delete(after, 5, 0), np.delete(before, 5, 0))


@jax.jit
def times_24(a, w):
    return fp8.times_24(fp8.by_rows_24(a), w)


@pytest.mark.parametrize(
    "message, changes",
    [
        ("a is float32: must be float8_e4m3fn", dict(a=jitted.sparsify_24(np.ones((8, 16), np.float32)))),
        ("b_t is float32: must be float8_e4m3fn", dict(b_t=jnp.ones((4, 16)))),
        (r"a \[8, 16\].* b_t\^T \[12, 4\]", dict(b_t=jnp.ones((4, 12), fp8.E4M3))),
        (r"scale \[4, 1\] must be \[8, 1\] for a \[8, 16\]", dict(scale=jnp.ones((4, 1)))),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_other_operands_are_refused(message, changes):
    a = fp8.by_rows_24(jitted.sparsify_24(np.ones((8, 16), np.float32)))
    with pytest.raises(ValueError, match=message):
        ops.matmul_24_fp8(**dict(a=a.values, b_t=jnp.ones((4, 16), fp8.E4M3), scale=a.scale) | changes)


@pytest.mark.gpu
def test_a_gpu_multiplies_in_fp8(rng):
    """XLA must recognise the products; else they would be right, and slow."""
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in operands(rng, 512, 256, 384))
    loss = lambda x, w: jnp.sum(jnp.square(fp8.linear(x, w)))  # noqa: E731
    compiled = functools.partial(jax.jit, compiler_options=fp8.COMPILER_OPTIONS)
    program = compiled(jax.grad(loss, argnums=(0, 1))).lower(x, w).compile().as_text()
    assert program.count("__cublas$lt$matmul$f8") >= 3
    assert '"operand_precision":["HIGHEST","HIGHEST"]' in program  # of the weight gradient
    expected = rounded(np.float32(x), 1) @ rounded(np.float32(w), None).T
    assert_same(compiled(fp8.linear)(x, w), expected, 0.01)


def test_other_gpus_are_refused(monkeypatch):
    class Device:
        platform, device_kind, compute_capability = "gpu", "A100", "8.0"

    monkeypatch.setattr(fp8.jax, "devices", lambda: [Device])
    assert fp8.unavailable() == "needs compute capability 8.9 or more; A100 has 8.0"
    Device.compute_capability = "12.0"
    assert fp8.unavailable() is None
