"""The rules that the docstring of `sparse_lm.ops.select` states."""

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import select
from tests.ops import jitted

INF, NAN = np.inf, np.nan


def _sparsify(group, method, dtype=jnp.float32):
    """(positions, values) of one group of four."""
    sparse = jitted.sparsify_24(jnp.array([group], dtype), method, key=jax.random.key(0))
    positions = tuple(np.flatnonzero(jitted.mask(sparse)[0]))
    return positions, np.asarray(sparse.values[0, :2], np.float32)


def _assert_same_bits(values, expected):
    np.testing.assert_array_equal(values, np.array(expected, np.float32))
    np.testing.assert_array_equal(np.signbit(values), np.signbit(expected))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "group, positions, magnitude, threshold",
    [
        ([1, -4, 3, 2], (1, 2), [-4, 3], [-2, 1]),
        ([2, 2, 2, 2], (0, 1), [2, 2], [0.0, 0.0]),
        ([-2, 1, 2, 2], (0, 2), [-2, 2], [0.0, 0.0]),  # ties: lower positions; thresholded to +0
        ([1, 3, 1, 1], (0, 1), [1, 3], [0.0, 2]),
        ([0, 0, 0, 0], (0, 1), [0.0, 0.0], [0.0, 0.0]),
        ([-0.0, 0.0, -0.0, 5], (0, 3), [-0.0, 5], [0.0, 5]),
        ([0.0, -0.0, 0.0, 0.0], (0, 1), [0.0, -0.0], [0.0, 0.0]),
        ([1, -INF, 2, 3], (1, 3), [-INF, 3], [-INF, 1]),
        ([INF, 1, 2, -INF], (0, 3), [INF, -INF], [INF, -INF]),
        ([INF, 1, -INF, INF], (0, 2), [INF, -INF], [0.0, 0.0]),
        ([INF, INF, 1, NAN], (0, 3), [INF, NAN], [0.0, NAN]),
        ([NAN, 1, 2, 3], (0, 3), [NAN, 3], [NAN, 1]),
        ([1, NAN, NAN, NAN], (1, 2), [NAN, NAN], [NAN, NAN]),
    ],
)
def test_groups_of_four(group, positions, magnitude, threshold, dtype):
    for method, expected in (("magnitude", magnitude), ("soft_threshold", threshold)):
        got_positions, values = _sparsify(group, method, dtype)
        assert got_positions == positions
        finite_or_inf = ~np.isnan(expected)
        _assert_same_bits(values[finite_or_inf], np.array(expected)[finite_or_inf])
        assert np.isnan(values[~finite_or_inf]).all()


@pytest.mark.parametrize("group, is_nan", [([0, 0, -0.0, 0], False), ([1, 2, INF, 3], True), ([NAN, 0, 0, 0], True)])
def test_mvue_of_groups_without_an_unbiased_draw(group, is_nan):
    positions, values = _sparsify(group, "mvue")
    assert positions == (0, 1)
    assert np.isnan(values).all() if is_nan else not values.any()


def test_largest_keeps_lower_positions_on_ties_and_ranks_nan_first():
    energy = jnp.array([[1, 5, 5, 0, 5, 5, 5, 2], [0] * 8, [1, INF, NAN, 2, 3, INF, 4, 5]], jnp.float32)
    np.testing.assert_array_equal(select.largest(energy, 4), [[1, 2, 4, 5], [0, 1, 2, 3], [1, 2, 5, 7]])


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(hypothesis.extra.numpy.arrays(np.float32, (2, 12), elements=st.integers(0, 5).map(float)))
def test_largest_is_a_stable_sort(energy):
    expected = np.sort(np.argsort(-energy, axis=-1, kind="stable")[:, :4], axis=-1)
    np.testing.assert_array_equal(_largest_four(energy), expected)


_largest_four = jax.jit(lambda energy: select.largest(energy, 4))
