"""Dense FFNs that are fitted to sparse ones."""

import jax
import numpy as np
import pytest

from sparse_lm.recipes.least_squares import RIDGE, fit_dense
from tests.recipes import masked_dense_ffn as dense64
from tests.recipes.examples import GATED, NEURONS, RECIPES, W2, X, state_of, w1_of

ALL = RECIPES | GATED


def least_squares(y, o, w2):
    """The W that minimises |Y W - O|^2 + r |W - W2|^2, by NumPy in float64."""
    root = np.sqrt(RIDGE * np.square(y).sum() / NEURONS)
    rows, targets = np.concatenate([y, root * np.eye(NEURONS)]), np.concatenate([o, root * w2])
    return np.linalg.lstsq(rows, targets, rcond=None)[0]


@pytest.mark.parametrize("name", ALL)
def test_w2_is_the_least_squares_solution_and_w1_what_the_sparse_forward_reads(name):
    recipe, w1 = ALL[name], w1_of(ALL[name])
    up, down = jax.jit(lambda *a: fit_dense(recipe, *a))(w1, W2, state_of(recipe), X)
    in_batches = jax.jit(lambda *a: fit_dense(recipe, *a))(w1, W2, state_of(recipe), X.reshape(3, -1, X.shape[1]))
    np.testing.assert_allclose(in_batches[1], down, rtol=1e-3, atol=1e-4)
    o, _ = jax.jit(recipe.for_evaluation().ffn)(X, w1, W2, state_of(recipe))
    left_up, left_down = (np.asarray(w, np.float64) for w in recipe.leave(w1, W2, state_of(recipe)))
    np.testing.assert_allclose(up, left_up, rtol=1e-6)
    y, _ = dense64.activate(np.asarray(X, np.float64) @ left_up.T, recipe.activation)
    expected = least_squares(y, np.asarray(o, np.float64), left_down)
    np.testing.assert_allclose(down, expected, rtol=1e-3, atol=1e-4)
    if recipe.name in ("fst", "sste"):  # which leave out no activation
        np.testing.assert_allclose(down, left_down, atol=1e-5)
    elif recipe.name in ("slices", "dense_slices", "venom"):
        assert np.abs(down - left_down).max() > 1e-2
