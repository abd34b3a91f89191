"""The plan of the sparse phase, from the configuration's knobs."""

import pytest

from sparse_lm.training.recipe import sparse_plan
from tests import small

KNOBS = {
    "venom": {
        "selection": "cluster_sets", "v": 32, "m": 16, "columns": "exhaustive", "clusters": 8, "neuron_run": 8,
        "distance": "l2", "dense_weights": "full",
    },
    "act24": {"dense_features": 0.25, "shuffle_tokens": False, "dense_weights": "full"},
}  # fmt: skip


@pytest.mark.parametrize("recipe", KNOBS)
def test_every_knob_reaches_the_plan(recipe):
    knobs = KNOBS[recipe]
    plan = sparse_plan(small.config(recipe, **{f"sparsity.{name}": value for name, value in knobs.items()}).sparsity)
    assert {name: getattr(plan, name) for name in knobs} == knobs
    other = sparse_plan(small.config(recipe).sparsity)
    assert all(getattr(other, name) != value for name, value in knobs.items())
