"""A run that never leaves its sparse phase: its model is the sparse one, wherever it is used."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from sparse_lm import evaluate, export
from sparse_lm.errors import WorkdirError
from sparse_lm.model import llama
from sparse_lm.training.checkpoints.restored import restore_for_dense, restore_model
from sparse_lm.training.telemetry.metrics import read_metrics
from tests.model.test_decode import by_pieces
from tests.runs import trained

STAYING = {"sparsity.end_step": 12, "sparsity.leave": False, "sparsity.dense_layers": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    return trained(corpus, tmp_path_factory.mktemp("staying"), "slices", **STAYING)


@pytest.mark.long
def test_evaluation_is_that_of_the_last_sparse_step(run):
    workdir, _ = run
    in_training = list(read_metrics(workdir))[-1]["eval_loss"]
    assert evaluate.evaluate(str(workdir))["loss"] == evaluate.evaluate(str(workdir), sparse=True)["loss"]
    assert in_training == pytest.approx(evaluate.evaluate(str(workdir))["loss"], rel=0.05)


@pytest.mark.long
def test_a_cached_step_computes_what_the_whole_sequence_does(run):
    workdir, config = run
    params, recipe, state, _ = restore_model(workdir, config)
    assert recipe == config.sparsity.recipe
    assert (params["layers"]["ffn"]["up"] != 0).mean() > 0.99  # those that are trained, and not their 2:4 form
    recipe = recipe.for_evaluation()
    net = llama.merge(llama.graphdef(config.model), params)
    sparse = dict(recipe=recipe, recipe_state=state, dense_layers=1)
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, config.model.vocab_size)
    whole = jax.jit(lambda tokens: net(tokens, **sparse)[0])(tokens)
    np.testing.assert_allclose(by_pieces(net, tokens, **sparse), whole, atol=2e-5)
    dense = jax.jit(lambda tokens: net(tokens)[0])(tokens)
    assert np.abs(dense - whole).max() > 1e-3


def test_what_computes_densely_refuses_it_or_is_given_a_dense_model_that_comes_close(run, tmp_path):
    workdir, config = run
    with pytest.raises(WorkdirError, match=r"by recipe 'slices' for good.*; --fit_dense makes"):
        export.export(workdir, tmp_path / "hf")
    with pytest.raises(WorkdirError, match="by recipe 'slices' for good"):
        evaluate.text_model(workdir, "latest", 128)
    export.export(workdir, tmp_path / "hf", fit_dense=True)
    params, _ = restore_for_dense(workdir, config, fit=True)
    down = load_file(tmp_path / "hf" / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(down, params["layers"]["ffn"]["down"][1].T)
    trained, _, _, _ = restore_model(workdir, config)
    for name in ("up", "down"):  # the first layer is dense
        first = (tree["layers"]["ffn"][name][0] for tree in (params, trained))
        np.testing.assert_array_equal(*first)


@pytest.mark.long
def test_a_dense_model_that_is_fitted_has_nearly_the_sparse_ones_loss(corpus, tmp_path):
    """And the weights that a run leaves with have not, which is why they are fitted."""
    steps = {"steps": 60, "sparsity.end_step": 60}
    leaving, _ = trained(corpus, tmp_path / "leaving", "slices", **steps)
    staying, _ = trained(corpus, tmp_path / "staying", "slices", **steps, **{"sparsity.leave": False})
    sparse, fitted = (evaluate.evaluate(str(staying), fit_dense=fit)["loss"] for fit in (False, True))
    left = evaluate.evaluate(str(leaving))["loss"]
    assert abs(fitted - sparse) < 0.3 * abs(left - sparse)
    with pytest.raises(WorkdirError, match="the FFNs of step 60 are dense already"):
        evaluate.evaluate(str(leaving), fit_dense=True)
    with pytest.raises(WorkdirError, match="not with both"):
        evaluate.evaluate(str(staying), sparse=True, fit_dense=True)


def test_experts_are_not_fitted(corpus, tmp_path):
    changes = {"sparsity.end_step": 12, "sparsity.leave": False}
    workdir, _ = trained(corpus, tmp_path, "experts24", **changes)
    with pytest.raises(WorkdirError, match="'experts24' computes experts, to which no dense FFN is fitted"):
        evaluate.evaluate(str(workdir), fit_dense=True)
