"""A mixture of experts as a run, dense, sparse, dense: it learns, and its metrics say how its experts are used."""

import numpy as np
import pytest

from sparse_lm.training.checkpoints.restored import restore_for_dense
from sparse_lm.training.telemetry.metrics import read_metrics
from tests.runs import trained


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    return trained(corpus, tmp_path_factory.mktemp("mixture"), "experts24")


@pytest.mark.long
def test_it_learns_in_every_phase_and_says_how_its_experts_are_used(run):
    workdir, config = run
    lines = list(read_metrics(workdir))
    assert [line["phase"] for line in lines] == 4 * ["dense"] + 4 * ["sparse"] + 4 * ["dense"]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert np.isfinite([line["grad_norm"] for line in lines]).all()
    for line in lines:
        load = np.array(line["expert_load"])
        assert load.shape == (config.model.layers, config.model.experts)
        np.testing.assert_allclose(load.sum(axis=1), 1, rtol=1e-5)
        assert (np.array(line["load_entropy"]) > 0.3).all() and (np.array(line["load_entropy"]) <= 1 + 1e-6).all()
        assert np.isfinite(line["router_z_loss"]).all()


def test_biases_move_by_loads_alone(run):
    """One step each way in each step, whatever optimizer and weight decay do."""
    workdir, config = run
    loads = np.array([line["expert_load"] for line in read_metrics(workdir)])
    missing = loads.mean(axis=-1, keepdims=True) - loads
    expected = 1e-3 * np.where(np.abs(missing) > 1e-6, np.sign(missing), 0).sum(axis=0)
    params, step = restore_for_dense(str(workdir), config)
    assert step == config.steps
    np.testing.assert_allclose(params["layers"]["ffn"]["router_bias"], expected, atol=1e-7)
    largest = [line["largest_router_bias"] for line in read_metrics(workdir)]
    assert np.max(largest[0]) == 0 and np.max(largest[-1]) > 0
