"""What a recipe does to the FFN's weights in training, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.recipes import Dense, Fst, Slices, SSte
from sparse_lm.training import ffn_weights
from tests.ops.numpy_sparse import top_two_of_four

LAYERS, DIM = 3, 8


def random_params(seed, neurons):
    rng = np.random.default_rng(seed)
    up, down = rng.standard_normal((2, LAYERS, neurons, DIM), np.float32)
    return {"norm": jnp.ones(3), "layers": {"ffn": {"up": up, "down": down, "other": jnp.ones(2)}}}


@pytest.mark.parametrize(
    "recipe, down_axis, neurons, dense_layers",
    [(SSte(), 1, 16, 0), (Slices(m=8), 2, 16, 1), (SSte(), 1, 2 * ffn_weights.WATCHED, 1)],
)
def test_flips_and_kept_energy(recipe, down_axis, neurons, dense_layers):
    """Of every group of four neurons, or of every second; layers that stay dense flip nothing and keep all."""
    before = random_params(0, neurons)
    after = jax.tree.map(lambda w, step: w + 0.1 * step, before, random_params(1, neurons))  # some patterns change

    @jax.jit
    def watch(before, after):
        return ffn_weights.watch(ffn_weights.patterns(before, recipe), after, recipe, dense_layers)

    found = watch(before, after)
    watched = np.arange(neurons).reshape(-1, 4)[:: max(1, neurons // ffn_weights.WATCHED)].ravel()
    flips, kept = [], []
    for name, axis in (("up", 2), ("down", down_axis)):
        old, new = (np.asarray(tree["layers"]["ffn"][name], np.float64)[:, watched] for tree in (before, after))
        pattern = top_two_of_four(new, axis)
        flips.append((top_two_of_four(old, axis) != pattern).mean((1, 2)))
        kept.append((new**2 * pattern).sum((1, 2)) / (new**2).sum((1, 2)))
    is_dense = np.arange(LAYERS) < dense_layers
    flips, kept = np.where(is_dense, 0, np.mean(flips, axis=0)), np.where(is_dense, 1, np.mean(kept, axis=0))
    assert (flips[dense_layers:] > 0.01).all()
    np.testing.assert_allclose(found["flip_rate"], flips, rtol=1e-6)
    np.testing.assert_allclose(found["kept_weight_energy"], kept, rtol=1e-5)


@pytest.mark.parametrize("recipe", [Dense(), Fst()])
def test_weights_whose_patterns_stay_are_not_watched(recipe):
    params = random_params(0, 16)
    assert ffn_weights.watch(ffn_weights.patterns(params, recipe), params, recipe, 0) == {}


@pytest.mark.parametrize("dense_layers", [0, 1])
def test_gradients_are_adjusted_but_for_dense_layers(dense_layers):
    recipe, params, gradients = Fst(mask_decay=0.5), random_params(0, 16), random_params(1, 16)
    states, _ = jax.jit(jax.vmap(recipe.enter))(*ffn_weights.matrices(params))
    transformation = ffn_weights.adjust_gradients(recipe, states, dense_layers)
    found, _ = transformation.update(gradients, transformation.init(params), params)
    sparse = (np.arange(LAYERS) >= dense_layers)[:, None, None]
    for name, mask in (("up", states.mask_up), ("down", states.mask_down)):
        w, g = (tree["layers"]["ffn"][name] for tree in (params, gradients))
        np.testing.assert_allclose(found["layers"]["ffn"][name], g + 0.5 * w * ~mask * sparse, rtol=1e-6)
    unchanged = ffn_weights.with_matrices(found, *ffn_weights.matrices(gradients))
    jax.tree.map(np.testing.assert_array_equal, unchanged, gradients)
