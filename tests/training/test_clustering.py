"""Centres that k-means places among the tokens of a batch."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from sparse_lm.training.step import forward_loss
from tests import small


@pytest.fixture(scope="module")
def entered():
    """A run at the first step of its sparse phase: configuration, trainer, transitions, state and batch."""
    config = small.config("cluster_sets", **{"sparsity.centres": "tokens"})
    return config, *small.compiled(config), jax.device_get(small.entered(config)), small.windows(config)


def nearness(config, trainer, state, windows, centroids):
    """Mean cosine between a token and its centre, [L], and the sums over each cluster's tokens."""
    variables = dataclasses.replace(state.variables, centroids=centroids)
    options = dict(config=config, graphdef=trainer.graphdef, plan=trainer.plan.for_measuring())
    measure = jax.jit(functools.partial(forward_loss, **options))
    sums = jax.device_get(measure(state.params, variables, windows, None)[1]["clusters"])
    directions = centroids / np.linalg.norm(centroids, axis=-1, keepdims=True)
    return (sums.inputs * directions).sum((1, 2)) / sums.tokens.sum(1), sums


def test_centres_of_tokens_are_where_the_tokens_are(entered):
    config, trainer, _, state, windows = entered
    near, sums = nearness(config, trainer, state, windows, np.asarray(state.variables.centroids))
    start, _ = nearness(config, trainer, state, windows, sums.candidates)
    assert (near > start + 0.02).all()
    assert (sums.tokens > 0).all()


def test_a_refresh_leaves_the_centres_where_they_are(entered):
    _, _, transitions, state, windows = entered
    moved_weights = jax.tree.map(lambda w: w + 0.02 * np.sign(w), state.params)
    after, _ = transitions.refresh(jax.device_put(dataclasses.replace(state, params=moved_weights)), windows)
    np.testing.assert_array_equal(after.variables.centroids, state.variables.centroids)
