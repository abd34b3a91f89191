"""Configurations of any values: refused by name, or such that a run can be made of them."""

import itertools
import json
import math

import jax
import ml_collections
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from hypothesis import given, reject
from hypothesis import strategies as st

from sparse_lm import config as config_lib
from sparse_lm.config import ConfigError
from sparse_lm.training.recipe import sparse_plan
from sparse_lm.training.step import make_trainer
from tests import small
from tests.fuzz.cases import cases

BASES = {recipe: flatten_dict(small.config_dict(recipe).to_dict(), sep=".") for recipe in small.RECIPES}
KEYS = sorted(BASES["dense"])
GROUPS = {key.partition(".")[0] for key in KEYS if "." in key}
NAMES = sorted(
    {
        *config_lib.RECIPES, *config_lib.SELECTIONS, *config_lib.DISTANCES, *config_lib.IMPLEMENTATIONS,
        *config_lib.MOMENTS, *config_lib.SCHEDULES, *config_lib.ACTIVATIONS, *config_lib.REMAT_POLICIES,
        *config_lib.DTYPES, *config_lib.COLUMN_CHOICES, *config_lib.CENTRES, *config_lib.DENSE_WEIGHTS,
    }
)  # fmt: skip

numbers = st.one_of(
    st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 1e-300, 1e300, 0.5]),
    st.sampled_from([0, 1, 2, 3, 4, 5, 8, 16, 32, 64, 128, -1, 2**31, 2**32, 2**64, 10**30]),
    st.integers(),
    st.floats(),
)
values = st.one_of(
    numbers,
    st.sampled_from(NAMES),
    st.text(max_size=5),
    st.booleans(),
    st.none(),
    st.lists(st.one_of(numbers, st.lists(st.integers(0, 12), max_size=3)), max_size=3),
    st.dictionaries(st.sampled_from(["a", "steps", ""]), numbers, max_size=2),
)
changes = st.dictionaries(st.sampled_from(KEYS), values, min_size=1, max_size=3)


def parse(recipe, changes):
    flat = {**BASES[recipe], **changes}
    return config_lib.parse(ml_collections.ConfigDict(unflatten_dict(flat, sep=".")))


def names_its_key(error: ConfigError) -> bool:
    return str(error).startswith(f"config.{error.key} = ") and error.key in {*KEYS, *GROUPS}


@cases(1500)
@given(recipe=st.sampled_from(sorted(BASES)), changes=changes)
def test_any_values_are_refused_by_name_or_make_a_sound_configuration(recipe, changes):
    try:
        config = parse(recipe, changes)
    except ConfigError as error:
        assert names_its_key(error)
        return
    as_json = json.dumps(config_lib.to_dict(config), allow_nan=False)  # as config.json keeps it
    assert config_lib.parse(ml_collections.ConfigDict(json.loads(as_json))) == config
    windows = config.sparsity.windows
    assert all(0 <= start < end <= config.steps for start, end in windows)
    assert all(earlier[1] < later[0] for earlier, later in itertools.pairwise(windows))
    for start, end in windows:
        assert (config.phase(start), config.phase(end - 1), config.phase(end)) == ("sparse", "sparse", "dense")
    assert config.tokens_per_part * config.parts == config.tokens_per_step
    sparse_plan(config.sparsity)


@cases(300)
@given(
    key=st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=12).filter(
        lambda key: key not in config_lib.default()
    ),
    group=st.sampled_from(["", "model.", "sparsity."]),
    value=values,
)
def test_unknown_keys_are_named(key, group, value):
    if group + key in KEYS:
        return
    with pytest.raises(ConfigError, match="unknown key; allowed: ") as error:
        parse("dense", {group + key: value})
    assert error.value.key == group + key


@st.composite
def shapes(draw):
    """Most of them fit together, and few are what a kernel would wish for."""
    heads, microbatches = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    m, v = draw(st.sampled_from([4, 8, 12, 16])), draw(st.sampled_from([4, 8, 64]))
    set_size = 4 * draw(st.integers(1, 3))
    return {
        "microbatches": microbatches,
        "batch_size": microbatches * draw(st.integers(1, 2)),
        "seq_len": draw(st.sampled_from([v, 2 * v, 3 * v, 7])),
        "model.dim": 4 * heads * draw(st.integers(1, 4)),
        "model.heads": heads,
        "model.kv_heads": draw(st.sampled_from([1, heads])),
        "model.ffn_dim": m * set_size // 4,
        "model.layers": draw(st.integers(1, 2)),
        "model.loss_chunk": draw(st.integers(1, 64)),
        "model.remat": draw(st.sampled_from(config_lib.REMAT_POLICIES)),
        "model.tie_embeddings": draw(st.booleans()),
        "model.dtype": draw(st.sampled_from(config_lib.DTYPES)),
        "sparsity.v": v,
        "sparsity.m": m,
        "sparsity.clusters": draw(st.sampled_from([m // 4, 1, 3])),
        "sparsity.neuron_run": draw(st.sampled_from([1, 2, 4])),
        "sparsity.dense_weights": draw(st.sampled_from(config_lib.DENSE_WEIGHTS)),
        "sparsity.dense_features": draw(st.floats(0, 1)),
        "sparsity.columns": draw(st.sampled_from(config_lib.COLUMN_CHOICES)),
    }


@cases(2)
@given(recipe=st.sampled_from(sorted(BASES)), shapes=shapes())
def test_a_step_of_any_accepted_shape_can_be_traced(recipe, shapes):
    """What `parse` lets pass no later check refuses: shapes that kernels cannot take are padded."""
    try:
        config = parse(recipe, shapes)
    except ConfigError:
        reject()
    trainer = make_trainer(config)
    state = trainer.abstract_state()
    windows = jax.ShapeDtypeStruct((config.batch_size, config.seq_len + 1), np.int32)
    for step in (trainer.dense_step, trainer.sparse_step):
        after, metrics = jax.eval_shape(step, state, windows)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(state)
        ]
        assert metrics["loss"].shape == ()
