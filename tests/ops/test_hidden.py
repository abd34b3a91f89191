"""The passes over the hidden layer, against masks written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops.activations import ACTIVATIONS, activate, rows_per_neuron
from tests.ops import jitted
from tests.ops.numpy_sparse import soft_threshold, top_two_of_four
from tests.ops.operands import assert_same_bits, exact_hidden, random
from tests.recipes.masked_dense_ffn import venom_mask

CASES = [("2:4", (64, 64)), ("2:4", (37, 52)), ("venom", (48, 64)), ("venom", (37, 40))]


def _select(selection, h):
    """(sparse Y and its stats, Y in NumPy, the mask that the sparse form must have)."""
    y = np.square(np.maximum(h, 0))
    if selection == "2:4":
        return jax.jit(ops.squared_relu_24)(h), y, top_two_of_four(y)
    return jax.jit(lambda h: ops.squared_relu_venom(h, v=16, m=8))(h), y, venom_mask(y, 16, 8)


@pytest.mark.parametrize("selection, shape", CASES)
def test_squared_relu_keeps_what_its_selection_keeps(selection, shape):
    (sparse, stats), y, mask = _select(selection, random(shape, seed=0))
    np.testing.assert_allclose(jitted.dense(sparse), y * mask, rtol=1e-6)
    exact = np.count_nonzero(y), np.square(y).sum(), np.square(y * mask).sum()
    np.testing.assert_allclose(stats, exact, rtol=1e-5)


@pytest.mark.parametrize("selection, shape", CASES)
def test_gradients_are_stored_where_y_is_and_their_transposes_are_2_of_4_tokens(selection, shape):
    (y, _), dense, mask = _select(selection, random(shape, seed=1))
    dy = random(shape, seed=2)
    condensed = lambda: jitted.condense(dy, y.columns[: -(-shape[0] // 16), : shape[1] // 2], 16)  # noqa: E731
    given = dy if selection == "2:4" else condensed()
    dh, dh_t, y_t, y_dy = jax.jit(ops.squared_relu_gradients)(given, y)
    expected, stored = 2 * np.sqrt(dense) * dy * mask, dense * mask
    np.testing.assert_allclose(jitted.dense(dh), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(dh.metadata, y.metadata)
    np.testing.assert_allclose(y_dy, (stored * dy).sum(axis=1), rtol=1e-5, atol=1e-5)
    for found, wanted in ((dh_t, expected), (y_t, stored)):
        wanted = (wanted * top_two_of_four(wanted, axis=0)).T
        np.testing.assert_allclose(jitted.dense(found), wanted, rtol=1e-5, atol=1e-6)


def test_rows_are_multiplied_by_their_factors_first():
    h, dy, factor = random((12, 16), seed=3), random((12, 16), seed=4), random((12, 1), seed=5)
    y, seen = jax.jit(ops.squared_relu_24)(h, factor=factor)
    expected = np.square(np.maximum(h * factor, 0))
    mask = top_two_of_four(expected)
    np.testing.assert_allclose(jitted.dense(y), expected * mask, rtol=1e-6)
    np.testing.assert_allclose(seen.energy, np.square(expected).sum(), rtol=1e-5)
    gradients = jax.jit(ops.squared_relu_gradients)(dy, y, factor=factor)
    np.testing.assert_allclose(jitted.dense(gradients.dh), 2 * np.sqrt(expected) * dy * factor * mask, rtol=1e-5)
    np.testing.assert_allclose(gradients.y_dy, (expected * dy * factor * mask).sum(axis=1), rtol=1e-5, atol=1e-5)


def test_energy_is_added_up_in_float32():
    _, stats = jax.jit(ops.squared_relu_24)(jnp.full((8, 8), 20, jnp.float16))  # 20^4 is no float16
    assert stats.energy == 64 * 20.0**4 and stats.kept_energy == 32 * 20.0**4


def test_gradients_round_once():
    h, dy = random((64, 64), jnp.bfloat16, 3), random((64, 64), jnp.bfloat16, 4)
    y, _ = jax.jit(ops.squared_relu_24)(h)
    exact = 2 * np.sqrt(np.asarray(jitted.dense(y), np.float64)) * np.asarray(dy, np.float64)
    result = np.asarray(jitted.dense(jax.jit(ops.squared_relu_gradients)(dy, y).dh), np.float64)
    np.testing.assert_allclose(result, exact, rtol=float(jnp.finfo(jnp.bfloat16).eps) / 2)


def test_weights_of_several_layers_have_their_own_scales():
    w, scale = random((3 * 20, 24), seed=5), jnp.array([1.0, 1.5, 2.0])
    sparse, dense = jax.jit(ops.soft_threshold_24)(w, scale)
    np.testing.assert_array_equal(jitted.dense(sparse), dense)
    np.testing.assert_array_equal(dense, np.repeat(scale, 20)[:, None] * soft_threshold(np.asarray(w), axis=1))
    transposed, its_dense = jax.jit(ops.soft_threshold_24, static_argnums=2)(w, scale[1:2], 0)
    np.testing.assert_array_equal(jitted.dense(transposed), its_dense)
    np.testing.assert_array_equal(its_dense, (scale[1] * soft_threshold(np.asarray(w), axis=0)).T)
    forms = jax.eval_shape(lambda w: ops.soft_threshold_24(w, scale, dtype=jnp.bfloat16), w)
    assert [form.dtype for form in forms] == [jnp.bfloat16] * 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_dense_hidden_layers_are_rounded_once(activation, dtype):
    """Also where float16 has no product of two of the numbers, and where two terms of a slope cancel."""
    shape = 37, 52
    h = random((shape[0], rows_per_neuron(activation) * shape[1]), dtype, seed=3, scale=3.0)
    h = h.at[:3].multiply(100).at[:3, 1::2].multiply(1e-4)
    dy = random(shape, dtype, seed=4).at[:3].multiply(1e-2)
    _, _, saved = activate(h, activation)
    dh, dh_t, y = ops.hidden_gradients(dy, saved, activation, key=jax.random.key(1))
    for found, exact in zip((dh, y), exact_hidden(dy, saved, activation), strict=True):
        # In JAX's GELU 1 + tanh loses bits where the gate is far below 0.
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=float(jnp.finfo(dtype).eps), atol=1e-4)
    assert_same_bits(dh_t, ops.sparsify_24(dh, "mvue", 0, key=jax.random.key(1)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_no_number_reaches_gradients(activation):
    """dH of a NaN in H, and no other."""
    h = random((4, 8 * rows_per_neuron(activation)), seed=5).at[1, 2].set(jnp.nan)
    _, _, saved = activate(h, activation)
    dh, _, _ = ops.hidden_gradients(jnp.ones((4, 8)), saved, activation, key=jax.random.key(1))
    both = slice(2, 4) if activation != "squared_relu" else 2
    np.testing.assert_array_equal(jnp.isnan(dh), jnp.zeros(dh.shape, bool).at[1, both].set(True))
