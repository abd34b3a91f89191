"""Metrics of 2:4 weights, against their pattern before and after a step, taken from the weights themselves."""

import numpy as np
import pytest

from sparse_lm.training.weight_metrics import WeightMetrics
from tests import small


def two_largest_of_four(weights, axis):
    """bool, like weights [L, F, D]: the two of largest magnitude of each four along the axis."""
    groups = np.moveaxis(np.abs(weights), axis, -1)
    ranks = groups.reshape(*groups.shape[:-1], -1, 4).argsort(-1).argsort(-1)
    return np.moveaxis((ranks >= 2).reshape(groups.shape), -1, axis)


@pytest.mark.parametrize("recipe, dense_layers", [("sste", 0), ("venom", 1)])
def test_flips_and_kept_energy(recipe, dense_layers):
    """Layers that stay dense flip nothing and keep all."""
    config = small.config(recipe, **{"sparsity.dense_layers": dense_layers})
    trainer, _ = small.compiled(config)
    state = small.entered(config)
    metrics = WeightMetrics(trainer.plan, dense_layers, None)

    before = {name: np.array(w)[dense_layers:] for name, w in state.params["layers"]["ffn"].items()}
    patterns = metrics.before(state)
    state, _ = trainer.sparse_step(state, small.windows(config))
    after = {name: np.array(w)[dense_layers:] for name, w in state.params["layers"]["ffn"].items()}
    result = metrics.after(patterns, state)

    axes = {"up": trainer.plan.weight_axis("W1"), "down": trainer.plan.weight_axis("W2")}
    axes = {name: axis % 2 + 1 for name, axis in axes.items()}
    old, new = ({n: two_largest_of_four(w[n], axes[n]) for n in axes} for w in (before, after))
    flips = np.mean([(old[n] ^ new[n]).mean((1, 2)) for n in axes], axis=0)
    energies = [np.square(after[n], dtype=np.float64) for n in axes]
    kept = np.mean([(e * new[n]).sum((1, 2)) / e.sum((1, 2)) for n, e in zip(axes, energies, strict=True)], axis=0)
    assert (flips > 0).all()
    np.testing.assert_allclose(result["flip_rate"], [0] * dense_layers + list(flips), rtol=1e-6)
    np.testing.assert_allclose(result["kept_weight_energy"], [1] * dense_layers + list(kept), rtol=1e-5)
