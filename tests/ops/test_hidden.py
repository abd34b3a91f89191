"""The passes over the hidden layer, against masks written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from tests.ops import jitted
from tests.ops.operands import random
from tests.recipes.masked_dense_ffn import top_two_of_four, venom_mask


def _relu_squared(h):
    return np.square(np.maximum(h, 0))


def _select(selection, h):
    """(sparse Y and its stats, Y in NumPy, the mask that the sparse form must have)."""
    y = _relu_squared(h)
    if selection == "2:4":
        return jax.jit(ops.squared_relu_24)(h), y, top_two_of_four(y)
    return jax.jit(lambda h: ops.squared_relu_venom(h, v=16, m=8))(h), y, venom_mask(y, 16, 8)


@pytest.mark.parametrize(
    "selection, shape", [("2:4", (64, 64)), ("2:4", (37, 52)), ("venom", (48, 64)), ("venom", (37, 40))]
)
def test_squared_relu_keeps_what_its_selection_keeps(selection, shape):
    (sparse, stats), y, mask = _select(selection, random(shape, seed=0))
    np.testing.assert_allclose(sparse.to_dense(), y * mask, rtol=1e-6)
    np.testing.assert_allclose(stats.nonzeros, np.count_nonzero(y))
    np.testing.assert_allclose(stats.energy, np.square(y).sum(), rtol=1e-5)
    np.testing.assert_allclose(stats.kept_energy, np.square(y * mask).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    "selection, shape", [("2:4", (64, 64)), ("2:4", (37, 52)), ("venom", (48, 64)), ("venom", (37, 40))]
)
def test_gradients_are_stored_where_y_is_and_their_transposes_are_2_of_4_tokens(selection, shape):
    (y, _), dense, mask = _select(selection, random(shape, seed=1))
    dy = random(shape, seed=2)
    given = dy if selection == "2:4" else ops.condense(dy, y.columns[: -(-shape[0] // 16), : shape[1] // 2], 16)
    dh, dh_t, y_t = jax.jit(ops.squared_relu_gradients)(given, y)
    expected = 2 * np.sqrt(dense) * dy * mask
    np.testing.assert_allclose(dh.to_dense(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(dh.metadata, y.metadata)
    np.testing.assert_allclose(dh_t.to_dense(), (expected * top_two_of_four(expected, axis=0)).T, rtol=1e-5, atol=1e-6)
    stored = dense * mask
    np.testing.assert_allclose(y_t.to_dense(), (stored * top_two_of_four(stored, axis=0)).T, rtol=1e-5)


def test_sampled_squared_relu_of_listed_neurons():
    """Integers, so that nothing is rounded; the last block lists no neuron, as blocks without tokens do."""
    rng = np.random.default_rng(5)
    w, x = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((24, 20), (21, 20)))
    w *= top_two_of_four(w)
    columns = np.stack([rng.permutation(24)[:12] for _ in range(2)] + [np.full(12, 24)])
    h = np.concatenate([x[:8] @ w[columns[0]].T, x[8:16] @ w[columns[1]].T, np.zeros((5, 12))])
    y = _relu_squared(h)
    sparse_w = ops.compress_24(jnp.asarray(w), jnp.asarray(w != 0))
    sparse, stats = jax.jit(lambda *args: ops.sampled_squared_relu_24(*args, v=8))(sparse_w, x, jnp.asarray(columns))
    np.testing.assert_array_equal(sparse.to_dense(), y * top_two_of_four(y))
    assert float(stats.nonzeros) == np.count_nonzero(y)


def test_sampled_squared_relu_is_of_h_in_the_dtype_of_x():
    w, x = jitted.sparsify_24(random((16, 8), jnp.bfloat16, 16)), random((8, 8), seed=17)
    columns = jnp.arange(16, dtype=jnp.int32)[None]

    @jax.jit
    def both(w, x):
        y, _ = ops.sampled_squared_relu_24(w, x, columns, 8)
        expected, _ = ops.squared_relu_24(ops.sampled_matmul_24(w, x, columns, 8))
        return y, expected

    y, expected = both(w, x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(jitted.dense(y), jitted.dense(expected))


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
    w = random((3 * 20, 24), seed=5)
    scale = jnp.array([1.0, 1.5, 2.0])
    for form in jax.jit(lambda w: ops.soft_threshold_24(w, scale, dtype=jnp.bfloat16))(w):
        assert form.dtype == jnp.bfloat16
    sparse, dense = jax.jit(ops.soft_threshold_24)(w, scale)
    np.testing.assert_array_equal(sparse.to_dense(), dense)
    for layer in range(3):
        rows = slice(20 * layer, 20 * layer + 20)
        alone = ops.sparsify_24(w[rows], "soft_threshold", scale=scale[layer]).to_dense()
        np.testing.assert_array_equal(dense[rows], alone)
