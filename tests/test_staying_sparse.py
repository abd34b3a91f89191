"""A run that never leaves its sparse phase: its model is the sparse one, wherever it is used."""

import jax
import numpy as np
import pytest

from sparse_lm import evaluate, export
from sparse_lm.errors import WorkdirError
from sparse_lm.model import llama
from sparse_lm.training import loop
from sparse_lm.training.checkpoints.restored import restore_model
from sparse_lm.training.telemetry.metrics import read_metrics
from tests.model.test_decode import by_pieces
from tests.runs import small_config


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    staying = {"sparsity.end_step": 12, "sparsity.leave": False, "sparsity.dense_layers": 1}
    config, workdir = small_config(corpus, "slices", **staying), tmp_path_factory.mktemp("staying")
    assert loop.train(config, str(workdir))
    return workdir, config


@pytest.mark.long
def test_evaluation_is_that_of_the_last_sparse_step(run):
    workdir, _ = run
    in_training = list(read_metrics(workdir))[-1]["eval_loss"]
    assert evaluate.evaluate(str(workdir))["loss"] == evaluate.evaluate(str(workdir), sparse=True)["loss"]
    assert in_training == pytest.approx(evaluate.evaluate(str(workdir))["loss"], rel=1e-6)


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


def test_what_computes_densely_refuses_it(run, tmp_path):
    workdir, _ = run
    for use in (lambda: export.export(workdir, tmp_path / "hf"), lambda: evaluate.text_model(workdir, "latest", 128)):
        with pytest.raises(WorkdirError, match="by recipe 'slices' for good"):
            use()
