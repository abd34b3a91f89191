import math

import jax
import numpy as np
import pytest

from sparse_lm.config import Config, OptimizerConfig
from sparse_lm.training.schedule import learning_rate


def rates(**options) -> np.ndarray:
    """The rate of every step of a run."""
    steps = options.pop("steps", 40)
    config = Config(steps=steps, optimizer=OptimizerConfig(learning_rate=2e-3, **options))
    return np.asarray(jax.vmap(learning_rate(config))(np.arange(steps)))


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_warmup_is_linear_and_starts_above_zero(schedule):
    rate = rates(schedule=schedule, decay_steps=10, warmup_steps=8)
    np.testing.assert_allclose(rate[:8], 2e-3 * np.arange(1, 9) / 8, rtol=1e-6)


def test_cosine_is_half_a_period_that_ends_with_the_last_step():
    rate = rates(schedule="cosine", warmup_steps=8, final_fraction=0.1)
    progress = np.arange(1, 33) / 32
    expected = 2e-3 * (0.1 + 0.9 * (1 + np.cos(math.pi * progress)) / 2)
    np.testing.assert_allclose(rate[8:], expected, rtol=1e-5)
    np.testing.assert_allclose(rate[-1], 2e-4, rtol=1e-5)


def test_wsd_is_flat_then_falls_on_a_straight_line():
    rate = rates(schedule="wsd", warmup_steps=8, decay_steps=10, final_fraction=0.0)
    np.testing.assert_allclose(rate[7:30], 2e-3, rtol=1e-6)
    np.testing.assert_allclose(rate[30:], 2e-3 * np.arange(9, -1, -1) / 10, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_rate_stays_final_past_the_end(schedule):
    config = Config(steps=20, optimizer=OptimizerConfig(warmup_steps=5, schedule=schedule, decay_steps=5))
    rate = learning_rate(config)
    np.testing.assert_allclose(rate(1000), rate(19), rtol=1e-6)
