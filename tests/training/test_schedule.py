import math

import jax
import numpy as np

from sparse_lm.config import Config, OptimizerConfig
from sparse_lm.training.schedule import learning_rate


def rates(**options) -> np.ndarray:
    """The rate of every step of a run of 40: it rises for 8 steps on a straight line, and stays after the last one."""
    options |= dict(learning_rate=2e-3, warmup_steps=8)
    schedule = learning_rate(Config(steps=40, optimizer=OptimizerConfig(**options)))
    rate = np.asarray(jax.vmap(schedule)(np.arange(40)))
    np.testing.assert_allclose(rate[:8], 2e-3 * np.arange(1, 9) / 8, rtol=1e-6)
    np.testing.assert_allclose(schedule(1000), rate[39], rtol=1e-6)
    return rate


def test_cosine_is_half_a_period_that_ends_with_the_last_step():
    rate = rates(schedule="cosine", final_fraction=0.1)
    progress = np.arange(1, 33) / 32
    expected = 2e-3 * (0.1 + 0.9 * (1 + np.cos(math.pi * progress)) / 2)
    np.testing.assert_allclose(rate[8:], expected, rtol=1e-5)
    np.testing.assert_allclose(rate[-1], 2e-4, rtol=1e-5)


def test_wsd_is_flat_then_falls_on_a_straight_line():
    rate = rates(schedule="wsd", decay_steps=10, final_fraction=0.0)
    np.testing.assert_allclose(rate[7:30], 2e-3, rtol=1e-6)
    np.testing.assert_allclose(rate[30:], 2e-3 * np.arange(9, -1, -1) / 10, rtol=1e-5, atol=1e-9)
