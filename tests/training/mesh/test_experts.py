"""Experts over a mesh axis of their own: a mixture's steps, gradients and checkpoints are those of one device."""

import functools

import jax
import numpy as np
import optax
import pytest

from sparse_lm import evaluate
from sparse_lm.training.loop import train
from tests import small
from tests.runs import lines, small_config, train_and_crash
from tests.training.mesh.test_layout import collectives_of_ffn

MIXTURE = small.MIXTURE | {"batch_size": 16}
MESH = {"mesh.expert": 2, "mesh.fsdp": 2, "mesh.data": 2, "microbatches": 2}


@functools.cache
def after_a_step(meshed):
    """The state and the metrics after a dense step, on a mesh or not."""
    config = small.config("dense", **MIXTURE | (MESH if meshed else {}))
    (trainer, _), windows = small.compiled(config), small.windows(config)
    if trainer.layout:
        windows = trainer.layout.place_batch(windows)
    state, metrics = trainer.steps["dense"](trainer.init(), windows)
    return state, jax.device_get(metrics)


def gradients(state):
    """The first moments of Adam: after one step a tenth of the clipped gradients."""
    return optax.tree.get(state.opt_state, "mu")


@pytest.mark.long
def test_gradients_are_those_of_one_device():
    (alone, expected), (state, metrics) = after_a_step(False), after_a_step(True)
    for key, value in expected.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-5, atol=1e-6, err_msg=key)
    leaves = jax.tree.leaves(gradients(state))
    for (path, wanted), found in zip(jax.tree.leaves_with_path(gradients(alone)), leaves, strict=True):
        assert np.abs(wanted).max() > 0 or path[-1].key == "router_bias"
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max(), err_msg=str(path))
    np.testing.assert_array_equal(*(s.params["layers"]["ffn"]["router_bias"] for s in (state, alone)))
    assert np.abs(state.params["layers"]["ffn"]["router_bias"]).max() > 0


def test_a_device_stores_its_experts_alone():
    state, _ = after_a_step(True)
    layers, rows, dim = state.params["layers"]["ffn"]["up"].shape
    for tree in (state.params, gradients(state)):
        ffn = tree["layers"]["ffn"]
        for name in ("up", "down"):
            assert ffn[name].sharding.shard_shape(ffn[name].shape) == (layers, rows // 4, dim)
        assert ffn["shared_up"].addressable_shards[0].data.shape[1] == ffn["shared_up"].shape[1] // 2


@pytest.mark.long
def test_tokens_travel_and_experts_do_not():
    """docs/mixtures.md says what travels: tokens of all devices, thrice, and sums of a device's own, twice."""
    size = {"model.experts": 8, "model.expert_dim": 96, "model.shared_expert_dim": 0}
    config = small.config("dense", **MIXTURE | size | {"mesh.expert": 8})
    trainer, _ = small.compiled(config)
    found = collectives_of_ffn(trainer.steps["dense"], config, trainer)
    kinds = {c.kind for c in found}
    shapes = {kind: sorted(shape for c in found if c.kind == kind for shape in c.shapes) for kind in kinds}
    tokens, choices, dim = config.tokens_per_step, config.model.experts_per_token, config.model.dim
    own = tokens // 8
    assert shapes.pop("all-gather") == [(tokens, choices)] + 3 * [(tokens, dim)]
    assert shapes.pop("reduce-scatter") == [(own, choices)] + 2 * [(own, dim)]
    assert set(shapes) <= {"all-reduce"} and set(shapes.get("all-reduce", [])) <= {()}  # statistics
    assert {c.times for c in found} == {config.model.layers}


@pytest.mark.long
def test_a_run_goes_on_on_another_mesh_and_is_used_on_one_device(corpus, tmp_path):
    config = functools.partial(small_config, corpus, "dense", **MIXTURE)
    assert train(config(), str(tmp_path / "alone"))
    workdir = tmp_path / "meshed"
    train_and_crash(config(**MESH), workdir, before=7)
    evaluated = evaluate.evaluate(str(workdir))
    assert evaluated["step"] == 6
    assert evaluated["loss"] == pytest.approx(lines(workdir)[-1]["eval_loss"], rel=1e-5)
    assert train(config(), str(workdir))
    for name in ("loss", "eval_loss"):
        alone, meshed = ([line[name] for line in lines(path) if name in line] for path in (tmp_path / "alone", workdir))
        assert len(meshed) == {"loss": 12, "eval_loss": 2}[name]
        np.testing.assert_allclose(meshed, alone, rtol=1e-3)
