"""Variables of real sparse phases are valid; broken ones are named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.training.validity import check_variables
from tests import small


@pytest.fixture(scope="module", params=["fst", "cluster_sets"])
def entered(request):
    """Configuration and variables just after the sparse phase has begun."""
    config = small.config(request.param)
    return config, small.entered(config).variables


BEGUN = 5  # `small.config` is sparse from step 4 on


def test_those_of_a_sparse_phase_are_valid(entered):
    config, variables = entered
    check_variables(variables, config, BEGUN)


def test_those_of_a_new_run_are_valid_until_it_begins(entered):
    config, _ = entered
    trainer, _ = small.compiled(config)
    variables = trainer.init().variables
    check_variables(variables, config, BEGUN - 1)
    if variables.columns is not None or variables.mask_up is not None:
        with pytest.raises(ValueError, match="in layer 0"):
            check_variables(variables, config, BEGUN)


def random_mask(rng, shape):
    """2:4 along rows, each row for itself: not along columns too."""
    order = rng.random((*shape[:-1], shape[-1] // 4, 4)).argsort(axis=-1)
    return jnp.asarray((order < 2).reshape(shape))


def test_what_is_broken_is_named(entered):
    config, variables = entered
    rng = np.random.default_rng(0)
    neurons = config.model.ffn_dim
    broken = {
        "mask_up": lambda mask: mask.at[1].set(random_mask(rng, mask.shape[1:])),
        "mask_down": lambda mask: mask.at[1, 7, 9].set(~mask[1, 7, 9]),
        "scale_up": lambda scale: scale.at[1].set(jnp.nan),
        "scale_down": lambda scale: scale.at[1].set(0),
        "centroids": lambda centres: centres.at[1, 0, 0].set(jnp.inf),
        "columns": lambda columns: columns.at[1, 0, -1].set(neurons),
    }
    for name, breaks in broken.items():
        value = getattr(variables, name)
        if value is not None:
            with pytest.raises(ValueError, match=rf"^{name} .* in layer 1$"):
                check_variables(dataclasses.replace(variables, **{name: breaks(value)}), config, BEGUN)
    if variables.columns is not None:
        twice = variables.columns.at[1, 0, 1].set(variables.columns[1, 0, 0])
        with pytest.raises(ValueError, match="columns are not ascending"):
            check_variables(dataclasses.replace(variables, columns=twice), config, BEGUN)


def test_a_mask_that_is_two_of_four_along_columns_alone_is_refused():
    config = small.config("fst")
    variables = small.entered(config).variables
    along_rows = random_mask(np.random.default_rng(0), variables.mask_down.shape[:0:-1])
    broken = dataclasses.replace(variables, mask_down=variables.mask_down.at[1].set(along_rows.T))
    with pytest.raises(ValueError, match=r"^mask_down is not 2:4 along both axes in layer 1$"):
        check_variables(broken, config, BEGUN)


def test_single_neurons_are_four_of_each_group(entered):
    """Kernels count on it, and would write elsewhere."""
    config, variables = entered
    if variables.columns is None:
        return
    m = config.sparsity.m
    left_out = np.setdiff1d(np.arange(m, 2 * m), variables.columns[1, 0])[0]
    five_and_three = jnp.sort(variables.columns.at[1, 0, 0].set(left_out), axis=-1)
    with pytest.raises(ValueError, match=f"columns are not four of each {m} in layer 1"):
        check_variables(dataclasses.replace(variables, columns=five_and_three), config, BEGUN)


def test_transposed_masks_are_valid_too(entered):
    config, variables = entered
    if variables.mask_up is None:
        return
    transposed = jax.tree.map(lambda mask: mask.swapaxes(1, 2), variables)
    check_variables(transposed, config, BEGUN)
