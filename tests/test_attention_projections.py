"""A projection with a 2:4 forward against numpy, and what it would save against sums done by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.attention_projections import predicted_ms, products_24, saved_share


def test_the_forward_and_dx_read_the_masked_weight_and_dw_no_weight():
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 24, 128), np.float32)
    w, scale = rng.standard_normal((128, 128), np.float32), np.float32(1.3)
    groups = w.reshape(128, 32, 4)
    threshold = np.sort(np.abs(groups), axis=-1)[..., 1:2]  # the second smallest goes, and all lose as much
    masked = scale * (np.sign(groups) * np.maximum(np.abs(groups) - threshold, 0)).reshape(w.shape)
    y, dx, dw = products_24(*map(jnp.asarray, (x, dy, w, scale)))
    np.testing.assert_allclose(y, x @ masked.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx, dy @ masked, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dw, dy.T @ x, rtol=1e-4, atol=1e-4)


def test_a_saving_is_weighed_by_the_projections_share():
    step = dict(step_ms=200.0, ms_by_part={"attention projections": {"total": 50.0}, "loss": {"total": 30.0}})
    assert saved_share(0.8, step) == pytest.approx(0.05)


def test_a_2_to_4_forward_saves_at_most_a_sixth():
    for dim in (2048, 4096):
        predicted = predicted_ms(32_768, dim)
        assert 5 / 6 < predicted["sparse"] / predicted["dense"] < 1
