"""Checkpoints read a matrix at a time hold what they hold when read whole."""

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from sparse_lm import ops
from sparse_lm.model import llama
from sparse_lm.training.checkpoints.checkpoint import Checkpoints, open_params
from sparse_lm.training.checkpoints.layerwise import LayerwiseParams
from sparse_lm.training.checkpoints.restored import restore_for_dense
from sparse_lm.training.workdir import save_config
from tests import small


@pytest.mark.parametrize("recipe, step, dense_layers", [("sste", 6, 0), ("fst", 6, 0), ("sste", 3, 0), ("venom", 6, 1)])
def test_same_parameters_as_when_read_whole(recipe, step, dense_layers, tmp_path):
    """In the sparse phase (step 6), those that its forward uses."""
    config = small.config(recipe, **{"sparsity.dense_layers": dense_layers})
    state = small.after_dense_steps(config, 0)
    other_weights = np.random.default_rng(1).standard_normal(state.params["layers"]["ffn"]["up"].shape, np.float32)
    masks = jax.jit(jax.vmap(ops.transposable_mask))(other_weights)
    recipe_state = jax.tree.map(lambda x: masks if x.dtype == bool else np.full_like(x, 1.5), state.recipe_state)
    save_config(tmp_path, config)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(step, {"params": state.params, "recipe_state": recipe_state})
    whole, _ = restore_for_dense(tmp_path, config)
    layerwise = LayerwiseParams(tmp_path, config)
    assert layerwise.step == step
    for path, expected in flatten_dict(whole).items():
        if path[0] == "layers":
            read = np.stack([layerwise.read(path, layer) for layer in range(config.model.layers)])
        else:
            read = layerwise.read(path)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, expected, err_msg="/".join(path))


def test_where_a_run_is_to_end_does_not_change_what_is_read(tmp_path):
    """Its sparse phase ends with step 8, and then perhaps the run."""
    config = small.config("sste")
    state = small.after_dense_steps(config, 0)
    recipe_state = jax.tree.map(lambda x: np.full_like(x, 1.5), state.recipe_state)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(8, {"params": state.params, "recipe_state": recipe_state})
    longer, shorter = (restore_for_dense(tmp_path, small.config("sste", steps=steps))[0] for steps in (12, 8))
    jax.tree.map(np.testing.assert_array_equal, longer, shorter)


def test_a_layer_is_read_alone(tmp_path):
    config = small.config()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, {"params": llama.init(config.model, jax.random.key(0))[1]})
    params, _, _ = open_params(tmp_path)
    model = config.model
    assert params["layers", "ffn", "up"].chunk_shape == (1, model.ffn_dim, model.dim)
